"""One running sample of a request: what is known of it, and where it stands in the batch.

A request with n samples is n sequences. The coordinator's sequence is the only truth about the
tokens: workers can be replaced at any time and are rebuilt from it. Who moves a sequence from
state to state is the scheduler; who reads its text is not known here.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import msgspec

from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.errors import InvalidRequestError, TPRuntimeError
from tp_runtime.messages import RowSampling, TokenLogprobs
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.grammar import Grammar, TokenMask


class SeqKey(NamedTuple):
    """`request` is unique among the requests of all clients; `sample` counts its samples from 0."""

    request: Hashable
    sample: int = 0


class SequenceState(enum.Enum):
    """HELD: in a row, and in no step before the mask of its next token is known. ENDING: the step
    that samples the last token is planned, its answer is not here yet."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"
    ENDING = "ending"
    FINISHED = "finished"


class Sequence:
    """Tokens, parameters and bookkeeping of one sample.

    `tokens` is the prompt followed by everything generated (array of int32). The *position* of a
    token is its index in `tokens`: the first generated token has position `prompt_len`. Sampling
    noise is keyed by (row seed, position, vocabulary id), so a sequence that is computed again
    after preemption or a crash draws the same tokens.

    `seed` is the request's; sample i of it draws with seed + i (`sampling.seed`, wrapped to signed
    64 bit). `arrival` is the time of `time.monotonic()`. `generated` are tokens that the client
    already has, when it resubmits a request that was under way.

    Raises InvalidRequestError for token ids that are not 32-bit integers.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "block_phase",
        "blocks",
        "computed",
        "end_due",
        "end_ids",
        "grammar",
        "hashes",
        "key",
        "last_step",
        "mask",
        "num_cached_tokens",
        "num_preemptions",
        "num_registered",
        "order",
        "params",
        "prepared_for",
        "prompt_len",
        "prompt_logprobs",
        "prompt_logprobs_due",
        "row",
        "sampling",
        "seed",
        "state",
        "tokens",
        "total_len",
    )

    def __init__(
        self,
        key: SeqKey,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        arrival: float = 0.0,
        generated: Iterable[int] = (),
    ) -> None:
        self.key = key
        self.params = params
        self.seed = seed
        self.arrival = arrival
        try:
            self.tokens = array("i", prompt_ids)
            self.prompt_len = len(self.tokens)
            self.tokens.extend(generated)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(
                f"Token ids must be integers between 0 and the vocabulary size ({error})."
            ) from None
        self.grammar: Grammar | None = None
        """Only the grammar threads look into it."""
        self.mask: TokenMask | None = None
        """With a grammar: what the next token may be; None while that is not known."""
        self.state = SequenceState.WAITING
        self.order = -1
        """Rank of arrival in the scheduler; older sequences have smaller numbers."""
        # Resolved by `admission.prepare`:
        self.prepared_for: SchedulerLimits | None = None
        self.total_len = 0
        """Prompt and generated tokens together when the sequence ends by length."""
        self.end_ids: frozenset[int] = frozenset()
        self.sampling: RowSampling | None = None
        self.hashes: list[bytes] = []
        """Chain hashes of the full blocks of `tokens` known so far (see prefix_hash)."""
        # For reports:
        self.admitted_at = 0.0
        """When it first left the queue, as `arrival`; 0: not yet."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.prompt_logprobs_due = params.prompt_logprobs is not None and not self.num_generated
        self.return_to_queue()

    def return_to_queue(self) -> None:
        """Forgets everything about workers and blocks; keeps every token."""
        if self.state is not SequenceState.FINISHED:
            self.state = SequenceState.WAITING
        self.row = -1
        self.blocks: list[int] = []
        self.computed = 0
        """Prefill: positions whose K and V are computed by steps planned so far."""
        self.num_registered = 0
        """Leading blocks already offered to the prefix cache."""
        self.block_phase = 0
        """A decode row begins a block in the steps of this number, by block size."""
        self.end_due = 0
        """The step that samples a decode row's last token."""
        self.last_step = 0
        """The last published step when the row was left."""
        if self.prompt_logprobs_due:
            self.prompt_logprobs = [None]  # nothing predicts the first token

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def generated_ids(self) -> list[int]:
        """A copy of everything generated so far."""
        return self.tokens[self.prompt_len :].tolist()

    @property
    def is_alive(self) -> bool:
        return self.state is not SequenceState.FINISHED

    @property
    def needs_answer(self) -> bool:
        """Whether an answer may end it early (end id, stop string), so that steps planned far
        ahead could be wasted, or others' steps would keep it waiting (a grammar)."""
        if self.params.stop or self.grammar is not None:
            return True
        return bool(self.end_ids) and self.params.min_tokens < self.total_len - self.prompt_len

    def __repr__(self) -> str:
        return (
            f"Sequence({self.key.request!r}/{self.key.sample}, {self.state.value}, "
            f"{self.prompt_len}+{self.num_generated}/{self.total_len} tokens)"
        )


class SteadyTokens(NamedTuple):
    """`num_steps` more tokens for each of `rows`, and nothing else to be said of them."""

    rows: tuple[Sequence, ...]
    columns: list[bytes]
    """Of each row its tokens, oldest first, packed as `messages.pack_ids` does."""
    num_steps: int


class SequenceUpdate(msgspec.Struct, gc=False):
    """What one answer means for one sequence; given to the front end in the order of rows.

    `finish_reason`: None while it runs, "stop" (end id; `stop_reason` names it when it was one of
    `stop_token_ids`), "length", or "error" with `error`. The end id itself is among the tokens.
    `prompt_logprobs` (one entry per prompt token, None for the first) comes once, with the first
    token or, when no token is wanted, at the end.
    """

    seq: Sequence
    token_id: int = -1
    """-1: no new token (with a finish reason only)."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: TPRuntimeError | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
