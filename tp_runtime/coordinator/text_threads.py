"""The threads that turn requests into tokens and tokens into text, beside the engine thread.

Requests go through the prompt pool to the engine's inbox. What the engine says of them comes back
here, to one output thread: it adds the new tokens to their samples, looks for stop strings, and
packs everything that is new for a client into one message. Which socket carries it is not known
here: `send` takes it over.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tp_runtime.coordinator.admission import prepare
from tp_runtime.coordinator.client_request import ClientRequest
from tp_runtime.coordinator.grammar_threads import GrammarThreads
from tp_runtime.coordinator.inbox import Inbox, RequestKey, SubmittedRequest
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.prompt_pool import PromptPool
from tp_runtime.coordinator.sample_text import SampleText, pack_id
from tp_runtime.coordinator.sequence import Sequence, SequenceUpdate, SteadyTokens
from tp_runtime.errors import RequestFailedError, TPRuntimeError
from tp_runtime.mailbox import Mailbox
from tp_runtime.messages import (
    Accepted,
    Detokenize,
    Failed,
    Outputs,
    SampleDelta,
    ServerMessage,
    Tokenize,
    Tokenized,
    encode,
    unpack_ids,
)
from tp_runtime.text.grammar import GrammarCompiler
from tp_runtime.text.tokenizer import Tokenizer
from tp_runtime.thread_name import name_this_thread

logger = logging.getLogger(__name__)


class Outgoing(NamedTuple):
    """An encoded message for a client; `ended` are the requests that it is the last word on.
    `is_output`: tokens, of no use to a client whose requests are all over."""

    client: bytes
    payload: bytes
    ended: tuple[str, ...] = ()
    is_output: bool = False


class _Accepted(NamedTuple):
    key: RequestKey


class _Failed(NamedTuple):
    request: ClientRequest | RequestKey
    error: TPRuntimeError


class _Reply(NamedTuple):
    client: bytes
    answer: ServerMessage


class _Steps(NamedTuple):
    pieces: list[SteadyTokens | list[SequenceUpdate]]


class _Close(NamedTuple):
    pass


_Work = _Steps | ClientRequest | _Accepted | _Failed | _Reply | _Close


class TextThreads:
    """`send` is called on the output thread with everything that is due, several messages at once.

    The first block of methods is for the front end, the second for the engine; any of them returns
    at once and may be called from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        inbox: Inbox,
        send: Callable[[list[Outgoing]], None],
        compiler: GrammarCompiler | None = None,
    ) -> None:
        self._inbox = inbox
        self._send = send
        self._work: Mailbox[_Work] = Mailbox()
        self._requests: dict[RequestKey, ClientRequest] = {}
        self._samples: dict[Sequence, tuple[SampleText, ClientRequest]] = {}
        """Those that run; by the sequence itself, so that a request which takes the name of a
        cancelled one does not get its tokens."""
        self._touched: dict[SampleText, ClientRequest] = {}
        self._deltas: dict[bytes, list[SampleDelta]] = {}
        self._outgoing: list[Outgoing] = []
        self.grammars = GrammarThreads(compiler, inbox)
        self._prompts = PromptPool(
            tokenizer, inbox, self._register, self._refuse, self._reply, self.grammars
        )
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the front end

    def submit(self, request: ClientRequest) -> None:
        self._prompts.submit(request)

    def ask(self, client: bytes, message: Tokenize | Detokenize) -> None:
        self._prompts.ask(client, message)

    def cancel(self, request: ClientRequest) -> None:
        """The request is over: nothing of it is sent any more, the engine drops it."""
        with request.lock:
            request.cancelled = True
            self._inbox.cancel(request.key)
        for seq in list(request.samples):
            self._samples.pop(seq, None)
        if self._requests.get(request.key) is request:
            self._requests.pop(request.key, None)

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends what was given so far, then ends the threads."""
        self._prompts.close()
        self.grammars.close()
        self._work.put(_Close())
        self._thread.join(timeout_s)

    # ------------------------------------------------------------ for the engine

    def accepted(self, request: SubmittedRequest) -> None:
        self._work.put(_Accepted(request.key))

    def failed(self, key: RequestKey, error: TPRuntimeError) -> None:
        """The end of the whole request; its other samples are cancelled if the engine has any."""
        self._work.put(_Failed(key, error))

    def updates(self, updates: list[SequenceUpdate]) -> None:
        """What one step brought; the list must not be changed afterwards."""
        self.steps([updates])

    def steps(self, pieces: list[SteadyTokens | list[SequenceUpdate]]) -> None:
        """What several steps brought, in order; as `updates`."""
        self._work.put(_Steps(pieces))

    def check_against(self, limits: SchedulerLimits) -> None:
        """From now on sequences are checked and hashed under these limits before they are
        submitted, which spares the engine thread the work."""
        self._prompts.prepare = lambda seq: prepare(seq, limits)

    # ------------------------------------------------------------ for the prompt pool

    def _register(self, request: ClientRequest) -> None:
        self._requests[request.key] = request
        self._samples.update({seq: (text, request) for seq, text in request.samples.items()})
        if any(text.finish_reason is not None for text in request.samples.values()):
            self._work.put(request)  # resumed, and complete with what its client already has

    def _refuse(self, request: ClientRequest, error: TPRuntimeError) -> None:
        self._work.put(_Failed(request, error))

    def _reply(self, client: bytes, answer: Tokenized | TPRuntimeError, request_id: str) -> None:
        if isinstance(answer, TPRuntimeError):
            self._work.put(_Reply(client, Failed(request_id, answer.code, str(answer))))
        else:
            self._work.put(_Reply(client, answer))

    # ------------------------------------------------------------ the output thread

    def _run(self) -> None:
        name_this_thread("output")
        poll = select.poll()
        poll.register(self._work.fileno(), select.POLLIN)
        open_ = True
        while open_:
            poll.poll()
            work = _join_steps(self._work.drain())
            for item in work:
                if isinstance(item, _Steps):
                    self._take(item.pieces, alone=len(work) == 1)
                elif isinstance(item, _Close):
                    open_ = False
                else:
                    self._guarded(self._do, item)
            self._guarded(self._flush)

    def _take(self, pieces: list[SteadyTokens | list[SequenceUpdate]], alone: bool) -> None:
        """When several steps have piled up, each sample gets one delta for all of them, which
        catches up sooner."""
        alone = alone and len(pieces) == 1
        steady: list[SteadyTokens] = []
        for piece in pieces:
            if steady and (isinstance(piece, list) or piece.rows is not steady[0].rows):
                self._take_safely(self._take_steady, steady)
                steady = []
            if not isinstance(piece, list):
                steady.append(piece)
            else:
                self._take_safely(self._take_step if alone else self._take_updates, piece)
        if steady:
            self._take_safely(self._take_steady, steady)

    def _take_safely(self, take: Callable[[list[Any]], None], given: list[Any]) -> None:
        """A fault that is not that of one request would leave a hole in the streams of the others:
        all whose tokens these were end with an error."""
        try:
            take(given)
        except Exception as error:
            logger.exception("The output thread failed in %s.", take.__name__)
            rows = (p.rows if isinstance(p, SteadyTokens) else (p.seq,) for p in given)
            for seq in {seq for some in rows for seq in some}:
                known = self._samples.get(seq)
                if known is not None:
                    self._fail(_Failed(known[1], _text_error(error)))

    def _guarded(self, action: Callable[..., None], *args: object) -> None:
        """No fault of one message may end the thread that serves all clients."""
        try:
            action(*args)
        except Exception:
            logger.exception("The output thread failed in %s.", action.__name__)

    def _do(self, work: _Work) -> None:
        if isinstance(work, _Accepted):
            self._accept(work.key)
        elif isinstance(work, _Failed):
            self._fail(work)
        elif isinstance(work, ClientRequest):
            self._end_complete_samples(work)
        elif isinstance(work, _Reply):
            self._outgoing.append(Outgoing(work.client, encode(work.answer)))

    def _take_step(self, updates: list[SequenceUpdate]) -> None:
        """One step of all rows: what is one more token and nothing else is packed at once."""
        plain = [u for u in updates if u.finish_reason is None and u.logprobs is None]
        rest = self._pack((update.seq, pack_id(update.token_id)) for update in plain)
        if rest or len(plain) < len(updates):
            packed = {update.seq for update in plain}.difference(seq for seq, _ in rest)
            self._take_updates([update for update in updates if update.seq not in packed])

    def _take_steady(self, steps: list[SteadyTokens]) -> None:
        """Steps of the same rows: all new tokens of a row are packed at once."""
        columns = steps[0].columns
        if len(steps) > 1:
            columns = [b"".join(parts) for parts in zip(*(s.columns for s in steps), strict=True)]
        rest = self._pack(zip(steps[0].rows, columns, strict=True))
        self._take_updates([SequenceUpdate(seq, i) for seq, ids in rest for i in unpack_ids(ids)])

    def _pack(self, new: Iterable[tuple[Sequence, bytes]]) -> list[tuple[Sequence, bytes]]:
        """Puts further tokens (packed) of each sequence among the deltas of its client. Returns
        those of which more has to be looked at than the tokens. Short: all rows come this way."""
        rest = []
        client, deltas = b"", None
        for seq, token_ids in new:
            known = self._samples.get(seq)
            if known is None:
                continue  # cancelled, or past a stop string
            text, request = known
            try:
                delta = text.next_delta(token_ids)
            except Exception as error:
                self._fail_text(request, error)
                continue
            if delta is None:
                rest.append((seq, token_ids))
                continue
            if deltas is None or client != request.key.client:
                client = request.key.client
                deltas = self._deltas.setdefault(client, [])
            deltas.append(delta)
        return rest

    def _take_updates(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            known = self._samples.get(update.seq)
            if known is None:
                continue
            text, request = known
            if text.finish_reason is not None:
                continue
            if update.error is not None:
                self._fail(_Failed(request, update.error))
                continue
            self._touched[text] = request
            try:
                ended = text.add(update)
            except Exception as error:
                self._fail_text(request, error)
                continue
            if text.num_tokens == 1 and update.token_id >= 0:
                self._time(request, text, update)
            if ended and update.finish_reason is None:
                self._inbox.stop(update.seq.key, text.num_tokens)

    def _time(self, request: ClientRequest, text: SampleText, update: SequenceUpdate) -> None:
        seq = update.seq
        queue_s = max(0.0, seq.admitted_at - request.arrival)
        text.set_timings(seq.num_cached_tokens, queue_s, time.monotonic() - request.arrival)

    def _accept(self, key: RequestKey) -> None:
        request = self._requests.get(key)
        if request is not None:
            message = Accepted(
                key.request_id, request.seed, request.num_prompt_tokens, request.prompt_ids
            )
            self._outgoing.append(Outgoing(key.client, encode(message)))

    def _fail(self, failure: _Failed) -> None:
        request = failure.request
        if isinstance(request, RequestKey):
            known = self._requests.get(request)
            if known is None:
                return
            request = known
        if request.cancelled:
            return
        self.cancel(request)
        for text in request.samples.values():
            self._touched.pop(text, None)
        key, error = request.key, failure.error
        payload = encode(Failed(key.request_id, error.code, str(error)))
        self._outgoing.append(Outgoing(key.client, payload, (key.request_id,)))

    def _end_complete_samples(self, request: ClientRequest) -> None:
        for text in request.samples.values():
            if text.finish_reason is not None:
                self._touched[text] = request

    def _flush(self) -> None:
        """One Outputs message per client, after whatever else is for it."""
        now = time.monotonic()
        ended: dict[bytes, list[str]] = {}
        deltas, self._deltas = self._deltas, {}
        touched, self._touched = self._touched, {}
        for text, request in touched.items():
            if request.cancelled or not text.due(now):
                continue
            try:
                delta = text.delta(now)
            except Exception as error:
                self._fail_text(request, error)
                continue
            client = request.key.client
            deltas.setdefault(client, []).append(delta)
            if text.finish_reason is not None and self._forget(request, text):
                ended.setdefault(client, []).append(request.key.request_id)
        for client, new in deltas.items():
            last = tuple(ended.get(client, ()))
            self._outgoing.append(Outgoing(client, encode(Outputs(new)), last, is_output=True))
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._send(outgoing)

    def _fail_text(self, request: ClientRequest, error: Exception) -> None:
        logger.exception("The text of %s could not be made.", request.key.request_id)
        self._fail(_Failed(request, _text_error(error)))

    def _forget(self, request: ClientRequest, text: SampleText) -> bool:
        """The sample has ended; True when it was the last one of its request."""
        ended = [seq for seq, each in request.samples.items() if each is text]
        request.samples = {s: t for s, t in request.samples.items() if t is not text}
        for seq in ended:
            self._samples.pop(seq, None)
        if request.samples:
            return False
        self._requests.pop(request.key, None)
        return True


def _join_steps(work: list[_Work]) -> list[_Work]:
    """The same with neighbouring steps as one, which take no longer than one then: a thread that is
    behind catches up."""
    joined: list[_Work] = []
    for item in work:
        if isinstance(item, _Steps) and joined and isinstance(joined[-1], _Steps):
            joined[-1] = _Steps(joined[-1].pieces + item.pieces)
        else:
            joined.append(item)
    return joined


def _text_error(error: Exception) -> RequestFailedError:
    return RequestFailedError(
        f"The text of this request could not be made ({type(error).__name__}: {error}); the "
        "server's log has more."
    )
