"""Every message of the system, one type each. The wire form is msgpack through msgspec.

Four conversations: client and coordinator (ZeroMQ), coordinator and worker (shared-memory rings
for plans and answers, a socket for status), coordinator and keeper (unix socket), coordinator and
the relays of other hosts (ZeroMQ), which carry the two before. Token ids travel
as packed little-endian int32 (`pack_ids`), everything else as plain msgpack.

This module knows nothing of sockets, rings, tensors or the scheduler.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from tp_runtime.sampling_params import SamplingParams

PROTOCOL_VERSION = 4
"""Raised with every change of a type below; peers with another version are refused by name."""

FRAME_HEADER = b"TPR" + bytes([PROTOCOL_VERSION])
"""First ZeroMQ frame of every client message, so that a wrong version is seen before decoding."""

MAX_MESSAGE_BYTES = 16 << 20
"""Largest client message that is taken. A prompt of a million ids has 5 MB; more than this is a
mistake or an attack."""

if sys.byteorder != "little":
    raise ImportError("tp_runtime packs ids in native order and needs a little-endian machine.")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or block ids as packed int32; raises OverflowError outside int32."""
    return array.array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`; raises ValueError when the length is not a multiple of four."""
    out = array.array("i")
    out.frombytes(data)
    return out.tolist()


# ---------------------------------------------------------------- client -> coordinator


class Resume(Struct, array_like=True, forbid_unknown_fields=True):
    """Where a resubmitted sample goes on: what its client already has.

    `token_ids` are all ids generated so far, `text_sent` the number of characters of text already
    delivered (held-back text is recomputed from the ids)."""

    index: int
    token_ids: bytes
    text_sent: int


class Generate(Struct, tag="generate", omit_defaults=True, forbid_unknown_fields=True):
    """One request. Exactly one of `prompt`, `prompt_token_ids`, `messages` is given."""

    request_id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    stream: bool = True
    """False: the coordinator sends one Outputs message with everything when the sample ends."""
    flush_s: float = 0.0
    """With `stream`: deltas of a sample are at least so many seconds apart (0: one per step), for
    clients that only want to be able to resume."""
    detokenize: bool = True
    own_text: bool = False
    """True: the generated text is decoded as a text of its own, as it is for `messages`; False:
    as going on with the prompt's, which keeps its first space. Matters to tokenizers that drop
    the first space of a text, and only to them."""
    timeout_s: float | None = None
    """The request fails with code timeout when it has not ended after so many seconds."""
    resume: list[Resume] = msgspec.field(default_factory=list)
    """Not empty: only the samples listed here are wanted, and each goes on where it stood."""


class Cancel(Struct, tag="cancel", forbid_unknown_fields=True):
    request_id: str


class Ping(Struct, tag="ping", forbid_unknown_fields=True):
    """Answered with Alive. The first message of a connection, so that the client knows which
    coordinator it talks to before it sends requests."""


class GetInfo(Struct, tag="get_info", forbid_unknown_fields=True):
    request_id: str


class Tokenize(Struct, tag="tokenize", omit_defaults=True, forbid_unknown_fields=True):
    """Text or chat messages to ids (`messages` through the chat template)."""

    request_id: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Struct, tag="detokenize", forbid_unknown_fields=True):
    request_id: str
    token_ids: list[int]


ClientMessage = Generate | Cancel | Ping | GetInfo | Tokenize | Detokenize

# ---------------------------------------------------------------- coordinator -> client


class Logprob(Struct, array_like=True):
    token_id: int
    logprob: float
    rank: int
    """1 = most likely."""


class TokenLogprobs(Struct, array_like=True):
    """The chosen token first, then the top alternatives in falling order (chosen one included)."""

    chosen: Logprob
    top: list[Logprob]


class Accepted(Struct, tag="accepted"):
    """The request is in the queue. `seed` is the one given or drawn."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""
    """Sent back only when the prompt came as text or messages."""


class SampleDelta(Struct, array_like=True, gc=False):
    """What is new of one sample. `finish_reason` (stop, length, or None while running);
    `stop_reason` is the stop string or token id that matched. Timings in seconds."""

    request_id: str
    index: int
    token_ids: bytes
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0


class Outputs(Struct, tag="outputs"):
    """All deltas of one step that belong to one client connection."""

    deltas: list[SampleDelta]


class Failed(Struct, tag="failed"):
    """The end of a request that did not work; `code` is one of `tp_runtime.errors`."""

    request_id: str
    code: str
    message: str


class RankStatus(Struct):
    """One rank now. `phase` as in transport.heartbeat; `age_s`: since it last said anything.
    `memory_bytes`: of its process on the host, 0 when that cannot be seen."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    age_s: float
    memory_bytes: int
    kv_block_bytes: int
    """Of one KV block on its device."""


class RestartReport(Struct):
    """Workers were replaced at `at` (seconds since the epoch); `cause` is a sentence. `seconds` by
    part of the recovery (see coordinator.recovery_clock), empty until the next token is there."""

    at: float
    cause: str
    seconds: dict[str, float] = {}


class SlowStep(Struct):
    """`seconds` from publishing to the answer, at `at` (seconds since the epoch)."""

    step: int
    at: float
    seconds: float
    decode_rows: int
    prefill_tokens: int


class Activity(Struct):
    """For the status page; the slowest step first."""

    ranks: list[RankStatus] = msgspec.field(default_factory=list)
    restarts: list[RestartReport] = msgspec.field(default_factory=list)
    slow_steps: list[SlowStep] = msgspec.field(default_factory=list)


class Info(Struct, tag="info"):
    request_id: str
    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    tensor_parallel_size: int
    dtype: str
    device: str
    has_chat_template: bool
    num_kv_blocks: int
    block_size: int
    state: str
    """starting, ready, recovering, draining"""
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    instance: str = ""
    """As in Alive; filled in by the front end, like `request_id`."""
    activity: Activity = msgspec.field(default_factory=Activity)


class Alive(Struct, tag="alive"):
    """Sent in answer to Ping and to every connected client once a second. `instance` is another
    one after the coordinator was started again; `state` as in Info."""

    instance: str
    state: str


class Tokenized(Struct, tag="tokenized"):
    request_id: str
    token_ids: bytes
    text: str
    """For Tokenize: the rendered prompt. For Detokenize: the text."""


ServerMessage = Accepted | Outputs | Failed | Info | Alive | Tokenized

# ---------------------------------------------------------------- coordinator -> worker: plans


class RowSampling(Struct, array_like=True, omit_defaults=True):
    """Sampling parameters of one row, already resolved by the coordinator (no None, no text)."""

    temperature: float
    seed: int
    """Signed 64 bit; with position and vocabulary id it keys the Gumbel noise."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: bytes = b""
    bias_values: list[float] = msgspec.field(default_factory=list)
    min_position: int = 0
    """Ids in `blocked_ids` are impossible while the sampled token's position is below this."""
    blocked_ids: bytes = b""
    logprobs: int = -1
    """Number of top alternatives to report; -1: no logprobs at all."""
    prompt_logprobs: int = -1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class NewRow(Struct, array_like=True, omit_defaults=True):
    """A row enters the batch, at a free place or that of a row which is gone; nothing of the latter
    stays. Its position is set by its first chunk. `prompt_len` separates prompt from generated
    tokens in `history` (all ids known so far); `history` is sent only where penalties need it."""

    row: int
    sampling: RowSampling
    prompt_len: int
    history: bytes = b""


class RowBlocks(Struct, array_like=True):
    """KV blocks appended to a row's table, starting at entry `first`."""

    row: int
    first: int
    blocks: bytes


class Chunk(Struct, array_like=True, omit_defaults=True):
    """Prefill tokens of one row at positions start, start + 1, ...; `sample` on the last chunk."""

    row: int
    start: int
    token_ids: bytes
    sample: bool
    next_id: bytes = b""
    """Only for rows with prompt logprobs: the prompt id after this chunk, packed; empty after the
    last prompt id."""


class RowMask(Struct, array_like=True, omit_defaults=True):
    """The only ids that may be sampled for a row in this step: `ids`, packed, where they are few;
    else `bits`, one per vocabulary id, the lowest bit of each byte first. An id past the end of
    `bits` may not be sampled."""

    row: int
    bits: bytes = b""
    ids: bytes = b""


class StepPlan(Struct, tag=1, array_like=True, omit_defaults=True):
    """One step, as a delta to the batch state that every rank holds (see workers.batch_state).

    Steps of a generation are numbered 1, 2, 3, ... without a gap; rows are 0 .. num_rows - 1.
    The parts are applied in this order: `moves` (source, target; all sources are read before any
    target is written; rows no longer named are gone), `new_rows`, `blocks`, `grown`; then the step
    runs: decode rows first (each consumes its last sampled id at its next position), then `chunks`.
    K and V of all tokens of the step are stored before any of them is read: a chunk may attend to
    blocks that another chunk of the same step fills. Sampled ids are answered in that order:
    decode rows, then chunks with `sample`. `decode_rows` is packed int32; None means rows
    0 .. num_rows - 1. A row in neither of them stays as it is.
    """

    generation: int
    step: int
    num_rows: int
    padded: int = 0
    """Size of the decode graph to replay, or of a larger one while that is not recorded (>= number
    of decode rows, which are then the first rows of the batch); 0: no graph."""
    decode_rows: bytes | None = None
    chunks: list[Chunk] = msgspec.field(default_factory=list)
    moves: list[tuple[int, int]] = msgspec.field(default_factory=list)
    new_rows: list[NewRow] = msgspec.field(default_factory=list)
    blocks: list[RowBlocks] = msgspec.field(default_factory=list)
    grown: bytes = b""
    """Packed int32 pairs (row, block): the block that holds the position which this decode row
    feeds in this step, one more in its table. 8 bytes each, however many rows grow at once."""
    check: bool = False
    """Compare a checksum of the device state across ranks in this step."""
    masks: list[RowMask] = msgspec.field(default_factory=list)
    """Of rows with a grammar, for the token that this step samples and no other."""
    records_graph: bool = False
    """Record the next of the graphs that are left, before the step. Such a step may have no row."""

    @property
    def num_decode(self) -> int:
        """Rows that decode."""
        return self.num_rows if self.decode_rows is None else len(self.decode_rows) // 4


class Stop(Struct, tag=2, array_like=True):
    """End the worker loop in order: release graphs, destroy the process group, exit 0."""

    generation: int
    step: int


# ---------------------------------------------------------------- worker -> coordinator


class RowLogprobs(Struct, array_like=True):
    """Entry `i` of the answer's ids; i = -1 - c for chunk c of the plan when it samples nothing.
    `prompt` holds, for a chunk of a row with prompt logprobs, the logprobs of the prompt tokens
    that follow each of its positions (one fewer on the last chunk)."""

    i: int
    chosen: Logprob | None
    top: list[Logprob]
    prompt: list[TokenLogprobs] = msgspec.field(default_factory=list)


class Answer(Struct, array_like=True, omit_defaults=True):
    """Rank 0's result of one step; `token_ids` in the order of the plan, -1: logits not finite."""

    generation: int
    step: int
    token_ids: bytes
    logprobs: list[RowLogprobs] = msgspec.field(default_factory=list)
    run_us: int = 0
    """From plan received to ids on the host, microseconds."""


class WorkerLoaded(Struct, tag="loaded"):
    """Weights are on the device. `digest` covers model config, vocabulary, parameter count and
    code version; ranks that differ are refused before READY."""

    rank: int
    digest: str
    num_parameters: int
    max_kv_blocks: int
    block_size: int
    kv_block_bytes: int
    attention_backend: str


class AllocateKV(Struct, tag="allocate_kv"):
    """Coordinator to worker: the number of blocks agreed on (the minimum of all ranks)."""

    num_blocks: int


class WorkerReady(Struct, tag="ready"):
    rank: int
    graph_sizes: list[int] = msgspec.field(default_factory=list)
    """Padded decode sizes the worker can replay, now or later; empty: eager."""
    graphs_left: int = 0
    """Graphs that plans with `records_graph` have recorded one by one; the same on every rank."""
    start_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds since its fork, by what it did."""


class WorkerProgress(Struct, tag="progress"):
    """A sentence about a wait (load, warm-up), shown by the launcher when it lasts over 2 s."""

    rank: int
    phase: str
    text: str


class WorkerFailed(Struct, tag="failed"):
    """The worker raised; it exits after sending this."""

    rank: int
    phase: str
    step: int
    error: str
    """One sentence."""
    traceback: str
    code: str = ""
    """Of tp_runtime.errors, for an error raised on purpose."""


WorkerStatus = WorkerLoaded | WorkerReady | WorkerProgress | WorkerFailed

# ---------------------------------------------------------------- coordinator <-> keeper


class KeeperHello(Struct, tag="hello"):
    version: int
    rank: int
    local_rank: int
    world_size: int
    pid: int
    host: str


class ForkWorker(Struct, tag="fork"):
    """Fork a worker for `generation`. Six descriptors ride along (SCM_RIGHTS), in this order:
    plan ring, its doorbell, answer ring, its doorbell, heartbeat page, status socket."""

    generation: int


class KillWorker(Struct, tag="kill"):
    generation: int


class Quit(Struct, tag="quit"):
    """Kill the worker if there is one and exit with this status."""

    status: int
    message: str = ""


class Pulse(Struct, tag="pulse"):
    """To keepers and relays, about once a second or more often: silence means that the coordinator
    is lost."""


class WorkerForked(Struct, tag="forked"):
    generation: int
    pid: int


class WorkerExited(Struct, tag="exited"):
    """`status` as from waitpid: >= 0 exit status, < 0 minus the signal."""

    generation: int
    pid: int
    status: int


KeeperMessage = KeeperHello | WorkerForked | WorkerExited
KeeperCommand = ForkWorker | KillWorker | Quit | Pulse

# ---------------------------------------------------------------- relay -> coordinator


class RelayHello(Struct, tag="relay_hello"):
    """The first message of a relay: it speaks for the keepers and workers of ranks `first_rank` ..
    `first_rank + num_ranks - 1`. `settings` are those of EngineConfig that must be the same on
    every host."""

    version: int
    token: str
    host: str
    first_rank: int
    num_ranks: int
    settings: dict[str, Any]


class FromRank(Struct, tag="from_rank"):
    """What the keeper of `rank` or its worker said, as it came."""

    rank: int
    message: WorkerForked | WorkerExited | WorkerStatus


class KeeperHere(Struct, tag="keeper_here"):
    """The keeper of this rank has said hello to the relay, which found nothing wrong with it."""

    rank: int


class KeeperGone(Struct, tag="keeper_gone"):
    """The connection of this rank's keeper ended; its worker ends with it."""

    rank: int


class HostBeats(Struct, tag="beats"):
    """Step, phase and age in seconds of each rank's last heartbeat, in rank order. Sent a few times
    a second whether anything has changed or not: silence means that the host is lost."""

    beats: list[tuple[int, int, float]]


class HostSignal(Struct, tag="host_signal"):
    """A person wants the server to end and said so on this host."""

    signum: int


class HostSpans(Struct, tag="host_spans"):
    """Under `--trace`: what a rank did since the last message of this kind (records of
    transport.trace_area). `clock`: CLOCK_MONOTONIC of that host in nanoseconds when this was sent.
    `last`: the relay ends, nothing follows."""

    generation: int
    rank: int
    records: bytes
    clock: int
    last: bool = False


class HostEnding(Struct, tag="host_ending"):
    """The relay's last message: why it ends now."""

    reason: str


RelayMessage = (
    RelayHello
    | FromRank
    | KeeperHere
    | KeeperGone
    | HostBeats
    | HostSignal
    | HostSpans
    | HostEnding
)

# ---------------------------------------------------------------- coordinator -> relay


class PublishPlan(Struct, tag="publish", gc=False):
    """Into the ring of the host's workers, as it is: an encoded StepPlan or Stop."""

    plan: bytes


class DropKeepers(Struct, tag="drop_keepers"):
    """End the keepers of the host with this status; others will take their place."""

    status: int


RelayCommand = ForkWorker | KillWorker | AllocateKV | PublishPlan | DropKeepers | Quit | Pulse

encode = msgspec.msgpack.Encoder().encode
