"""The threads that compile grammars and compute masks, beside the engine thread.

One thread compiles, which may take a second; two compute masks, which take a fraction of a
millisecond each, so no stream waits for somebody else's schema. A sample has at most one mask on
its way, so its tokens are consumed in order. What comes out goes to the engine's inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.errors import InvalidRequestError, RequestFailedError, TPRuntimeError
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.grammar import Grammar, GrammarCompiler
from tp_runtime.thread_name import name_this_thread

logger = logging.getLogger(__name__)

MASK_THREADS = 2

_Work = queue.SimpleQueue[Callable[[], None] | None]


class GrammarThreads:
    """`compiler` None: the server has no tokenizer. Methods may be called from any thread and
    return at once."""

    def __init__(self, compiler: GrammarCompiler | None, inbox: Inbox) -> None:
        self._compiler = compiler
        self._inbox = inbox
        self._closed = False
        self._compiles: _Work = queue.SimpleQueue()
        self._masks: _Work = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if compiler is not None:
            self._compiles.put(partial(self._load, compiler))
            self._threads = [
                threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
                for name, work in [
                    ("compile", self._compiles),
                    *[("grammar", self._masks)] * MASK_THREADS,
                ]
            ]
        for thread in self._threads:
            thread.start()

    def compile(
        self, params: SamplingParams, done: Callable[[Grammar | TPRuntimeError], None]
    ) -> None:
        """`done` is called on the compiling thread, also with what it cannot compile."""
        compiler = self._compiler
        if compiler is None:
            done(
                InvalidRequestError(
                    "The model folder of this server has no tokenizer, so structured_outputs "
                    "cannot be used."
                )
            )
        else:
            self._compiles.put(partial(self._compile, compiler, params, done))

    def advance(self, seqs: list[Sequence]) -> None:
        """Each of `seqs` has one more token; the inbox is told what may follow it."""
        for seq in seqs:
            self._masks.put(partial(self._advance, seq, seq.tokens[-1]))

    def close(self) -> None:
        """Ends the threads, each after what it is busy with; waits for none."""
        self._closed = True
        self._compiles.put(None)
        for _ in range(MASK_THREADS):
            self._masks.put(None)

    # ------------------------------------------------------------ the threads

    def _run(self, work: _Work) -> None:
        name_this_thread(threading.current_thread().name)
        while (action := work.get()) is not None and not self._closed:
            action()

    def _load(self, compiler: GrammarCompiler) -> None:
        """At start, while no stream can be held up: the tree of all tokens is built in one go."""
        try:
            compiler.load()
        except InvalidRequestError:
            pass  # said to whoever asks for a grammar
        except Exception:
            logger.exception("The vocabulary could not be prepared for grammars.")

    def _compile(
        self,
        compiler: GrammarCompiler,
        params: SamplingParams,
        done: Callable[[Grammar | TPRuntimeError], None],
    ) -> None:
        wanted = params.structured_outputs
        assert wanted is not None, "only requests with a grammar come here"
        result: Grammar | TPRuntimeError
        try:
            result = compiler.compile(wanted, params.stop_token_ids, not params.ignore_eos)
        except BaseException as error:  # a panic of the library is no Exception
            result = _told(error)
        done(result)

    def _advance(self, seq: Sequence, token_id: int) -> None:
        grammar = seq.grammar
        assert grammar is not None, "only samples with a grammar have masks"
        try:
            grammar.consume([token_id])
            self._inbox.mask(seq, grammar.next_mask())
        except BaseException as error:
            self._inbox.mask(seq, _told(error))


def _told(error: BaseException) -> TPRuntimeError:
    if isinstance(error, TPRuntimeError):
        return error
    logger.error("A grammar failed.", exc_info=error)
    return RequestFailedError(
        f"The grammar of this request failed ({type(error).__name__}: {error}); the server's log "
        "has more."
    )
