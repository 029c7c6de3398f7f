"""An engine without model: it drains a real inbox and answers with tokens of a fixed story.

What a sample gets depends only on its seed and on how many tokens it has, so a resumed sample must
go on exactly as the undisturbed one. Used with the real front end, text threads and clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.text.small_tokenizers import TEXTS, byte_level
from tp_runtime.coordinator.frontend import Frontend, FrontendLimits
from tp_runtime.coordinator.inbox import Inbox, RequestKey, StopSample, SubmittedRequest
from tp_runtime.coordinator.sequence import SeqKey, Sequence, SequenceUpdate
from tp_runtime.errors import OverloadedError
from tp_runtime.messages import Info, Logprob, TokenLogprobs
from tp_runtime.text.chat_template import ChatTemplate
from tp_runtime.text.grammar import GrammarCompiler
from tp_runtime.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}:"
TOKENIZER = Tokenizer(byte_level(), {}, ChatTemplate({"default": TEMPLATE}, {}))
STORY = TOKENIZER.encode(" ".join(TEXTS), add_special_tokens=False)
END_ID = TOKENIZER.encode("</s>")[0]


def letters(text: str) -> list[int]:
    """One token per character (ASCII only), where `encode` would merge some."""
    return [TOKENIZER.encode(char)[0] for char in text]


def story(seed: int, num_tokens: int) -> list[int]:
    """What a sample with this seed says."""
    return [STORY[(seed * 7 + i) % len(STORY)] for i in range(num_tokens)]


def story_text(seed: int, num_tokens: int) -> str:
    return TOKENIZER.decode(story(seed, num_tokens))


class FakeEngine:
    """Runs on a thread of its own; all samples advance by one token per step."""

    def __init__(self, inbox: Inbox, frontend: Frontend, step_s: float, max_requests: int) -> None:
        self.running: dict[SeqKey, Sequence] = {}
        self.submitted: list[SubmittedRequest] = []
        self.cancelled: list[RequestKey] = []
        self.stopped: list[StopSample] = []
        self.steps = 0
        self.end_after: int | None = None
        """The end id is sampled as the token after so many."""
        self.run = threading.Event()
        self.run.set()
        self._inbox = inbox
        self._texts = frontend.texts
        self.step_s = step_s
        self._max_requests = max_requests
        self._open = True
        self._thread = threading.Thread(target=self._loop, name="fake engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self.run.set()
        self._thread.join(5)

    def _loop(self) -> None:
        while self._open:
            for item in self._inbox.drain():
                self._take(item)
            if self.run.is_set() and self.running:
                self._step()
            time.sleep(self.step_s or 0.0002)

    def _take(self, item: object) -> None:
        if isinstance(item, SubmittedRequest):
            self.submitted.append(item)
            if len({key.request for key in self.running}) >= self._max_requests:
                self._texts.failed(item.key, OverloadedError("The fake engine is full."))
                return
            self.running |= {seq.key: seq for seq in item.sequences}
            self._texts.accepted(item)
        elif isinstance(item, StopSample):
            self.stopped.append(item)
            self.running.pop(item.key, None)
        else:
            key: RequestKey = item.key  # type: ignore[attr-defined]
            self.cancelled.append(key)
            self.running = {k: seq for k, seq in self.running.items() if k.request != key}

    def _step(self) -> None:
        self.steps += 1
        updates = [self._next(seq) for seq in self.running.values()]
        self._texts.updates(updates)
        for update in updates:
            if update.finish_reason is not None:
                del self.running[update.seq.key]

    def _next(self, seq: Sequence) -> SequenceUpdate:
        at, params = seq.num_generated, seq.params
        if params.max_tokens == at:
            return SequenceUpdate(seq, finish_reason="length")
        token = STORY[((seq.seed + seq.key.sample) * 7 + at) % len(STORY)]
        reason = None
        if self.end_after == at:
            token, reason = END_ID, "stop"
        elif params.max_tokens == at + 1:
            reason = "length"
        seq.tokens.append(token)
        update = SequenceUpdate(seq, token, finish_reason=reason)
        if params.logprobs is not None:
            update.logprobs = TokenLogprobs(Logprob(token, -0.5, 1), [Logprob(token, -0.5, 1)])
        if params.prompt_logprobs is not None and not at:
            update.prompt_logprobs = [None]
        return update


class FakeServer:
    """A front end with a fake engine behind it, in this process."""

    def __init__(
        self,
        listen: str = "tcp://127.0.0.1:0",
        step_s: float = 0.0,
        limits: FrontendLimits | None = None,
        tokenizer: Tokenizer | None = TOKENIZER,
        max_requests: int = 4096,
    ) -> None:
        self.inbox = Inbox()
        self.state = "ready"
        compiler = None if tokenizer is None else GrammarCompiler(tokenizer, [END_ID], 400)
        self.frontend = Frontend(
            listen, tokenizer, self.inbox, self._info, limits, compiler=compiler
        )
        self.engine = FakeEngine(self.inbox, self.frontend, step_s, max_requests)
        self.frontend.start()

    @property
    def address(self) -> str:
        return self.frontend.address

    def _info(self) -> Info:
        return Info(
            "", "fake", "Fake", 4096, 400, 1, "float32", "cpu", True, 64, 16, self.state, {"x": 1.0}
        )

    def close(self) -> None:
        """As a coordinator that dies: nothing more is said to anybody."""
        self.engine.close()
        self.frontend.close(0.5)


@contextmanager
def fake_server(
    listen: str = "tcp://127.0.0.1:0",
    step_s: float = 0.0,
    limits: FrontendLimits | None = None,
    tokenizer: Tokenizer | None = TOKENIZER,
    max_requests: int = 4096,
) -> Iterator[FakeServer]:
    server = FakeServer(listen, step_s, limits, tokenizer, max_requests)
    try:
        yield server
    finally:
        server.close()


def wait_until(condition: object, timeout_s: float = 5.0) -> None:
    """Polls a callable; fails the test when it does not become true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)
