"""Prompts to sequences, on a few threads: chat template, tokenizer, checks that read every id.

Tokenizing releases the interpreter lock, so a prompt of a million characters disturbs neither the
scheduler nor the sockets. Knows nothing of sockets; hands the sequences to the engine's inbox.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable

import msgspec

from tp_runtime.coordinator.client_request import ClientRequest
from tp_runtime.coordinator.grammar_threads import GrammarThreads
from tp_runtime.coordinator.inbox import Inbox, SubmittedRequest
from tp_runtime.coordinator.sample_text import SampleText
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.errors import InvalidRequestError, RequestFailedError, TPRuntimeError
from tp_runtime.messages import (
    Detokenize,
    Generate,
    Resume,
    Tokenize,
    Tokenized,
    pack_ids,
    unpack_ids,
)
from tp_runtime.text.grammar import Grammar
from tp_runtime.text.tokenizer import Tokenizer
from tp_runtime.thread_name import name_this_thread

logger = logging.getLogger(__name__)

Registrar = Callable[[ClientRequest], None]
Prepare = Callable[[Sequence], None]


def _nothing(seq: Sequence) -> None:
    """The engine checks every sequence anyway; `prepare` only spares its thread the work."""


class PromptPool:
    """`register` is told of a request before the engine can answer it, `fail` when it cannot be
    submitted, `reply` of answers to Tokenize and Detokenize."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        inbox: Inbox,
        register: Registrar,
        fail: Callable[[ClientRequest, TPRuntimeError], None],
        reply: Callable[[bytes, Tokenized | TPRuntimeError, str], None],
        grammars: GrammarThreads,
        threads: int = 2,
    ) -> None:
        self.prepare: Prepare = _nothing
        """May be replaced at any time, once the engine's limits are known."""
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._register = register
        self._fail = fail
        self._reply = reply
        self._grammars = grammars
        self._closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="tokenize", daemon=True) for _ in range(threads)
        ]  # daemons: a long prompt must not hold up the end of the process
        for thread in self._threads:
            thread.start()

    def submit(self, request: ClientRequest) -> None:
        self._work.put(lambda: self._submit(request))

    def ask(self, client: bytes, message: Tokenize | Detokenize) -> None:
        self._work.put(lambda: self._ask(client, message))

    def close(self) -> None:
        """Ends the threads, each after the prompt it is busy with; waits for none."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        name_this_thread("tokenize")
        while (work := self._work.get()) is not None and not self._closed:
            work()

    def _submit(self, request: ClientRequest) -> None:
        try:
            sequences = self._sequences(request)
            for seq in sequences:
                self.prepare(seq)
        except TPRuntimeError as error:
            self._fail(request, error)
            return
        except Exception as error:
            logger.exception("Request %s could not be prepared.", request.key.request_id)
            self._fail(request, _internal(error))
            return
        if request.message.params.structured_outputs is None:
            self._hand_over(request, sequences)
        else:
            self._grammars.compile(
                request.message.params, lambda grammar: self._constrain(request, sequences, grammar)
            )

    def _hand_over(self, request: ClientRequest, sequences: list[Sequence]) -> None:
        with request.lock:
            if not request.cancelled:
                self._register(request)
                if sequences:  # else everything was there when it was resumed
                    self._inbox.submit(SubmittedRequest(request.key, sequences, request.deadline))

    def _constrain(
        self,
        request: ClientRequest,
        sequences: list[Sequence],
        grammar: Grammar | TPRuntimeError,
    ) -> None:
        """On the compiling thread: every sample gets a grammar of its own, at its newest token."""
        try:
            if isinstance(grammar, TPRuntimeError):
                raise grammar
            running = []
            for seq in sequences:
                seq.grammar = grammar.copy()
                seq.grammar.consume(seq.generated_ids)
                seq.mask = seq.grammar.next_mask()
                if seq.mask is not None:
                    running.append(seq)
                elif seq.num_generated:
                    request.samples[seq].end("stop")
                else:
                    raise InvalidRequestError("structured_outputs allows no text at all.")
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, TPRuntimeError):
                logger.exception("Request %s could not be prepared.", request.key.request_id)
                error = _internal(error)
            self._fail(request, error)
        else:
            self._hand_over(request, running)

    def _sequences(self, request: ClientRequest) -> list[Sequence]:
        """One per wanted sample, with their SampleText in `request.samples`; those that the
        client's own ids already complete stay out of the engine's hands."""
        message = request.message
        ids = self._prompt_ids(message)
        request.num_prompt_tokens = len(ids)
        if message.prompt_token_ids is None:
            request.prompt_ids = pack_ids(ids)
        params = msgspec.structs.replace(message.params, seed=request.seed)
        resumes = message.resume or [Resume(i, b"", 0) for i in range(params.n)]
        sequences = []
        for resume in resumes:
            generated = unpack_ids(resume.token_ids)
            text = self._sample_text(message, resume.index, ids)
            text.resume(generated, resume.text_sent)
            seq = Sequence(
                SeqKey(request.key, resume.index),
                ids,
                params,
                seed=request.seed,
                arrival=request.arrival,
                generated=generated,
            )
            request.samples[seq] = text
            if text.finish_reason is None:
                sequences.append(seq)
        return sequences

    def _prompt_ids(self, message: Generate) -> list[int]:
        if message.prompt_token_ids is not None:
            if message.params.stop:
                self._need_tokenizer("stop strings")
            return message.prompt_token_ids
        tokenizer = self._need_tokenizer("a text prompt")
        if message.prompt is not None:
            return tokenizer.encode(message.prompt, message.add_special_tokens)
        text = tokenizer.render_chat(
            message.messages or [], message.tools, message.chat_template_kwargs
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"The model folder of this server has no tokenizer, so {what} cannot be used; "
                "send prompt_token_ids."
            )
        return self._tokenizer

    def _sample_text(self, message: Generate, index: int, prompt_ids: list[int]) -> SampleText:
        detokenizer = None
        if message.detokenize and self._tokenizer is not None:
            own_text = message.own_text or message.messages is not None
            detokenizer = self._tokenizer.detokenizer(
                message.params.skip_special_tokens, () if own_text else prompt_ids[-8:]
            )
        flush_s = message.flush_s if message.stream else math.inf
        return SampleText(message.request_id, index, message.params, detokenizer, flush_s)

    def _ask(self, client: bytes, message: Tokenize | Detokenize) -> None:
        answer: Tokenized | TPRuntimeError
        try:
            if isinstance(message, Tokenize):
                answer = self._tokenize(message)
            else:
                text = self._need_tokenizer("text").decode(message.token_ids)
                answer = Tokenized(message.request_id, b"", text)
        except TPRuntimeError as error:
            answer = error
        except Exception as error:
            logger.exception("Tokenize %s failed.", message.request_id)
            answer = _internal(error)
        self._reply(client, answer, message.request_id)

    def _tokenize(self, message: Tokenize) -> Tokenized:
        tokenizer = self._need_tokenizer("text")
        if (message.prompt is None) == (message.messages is None):
            raise InvalidRequestError("Exactly one of prompt and messages must be given.")
        if message.messages is not None:
            text = tokenizer.render_chat(message.messages, None, message.chat_template_kwargs)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            text = message.prompt or ""
            ids = tokenizer.encode(text, message.add_special_tokens)
        return Tokenized(message.request_id, pack_ids(ids), text)


def _internal(error: BaseException) -> RequestFailedError:
    return RequestFailedError(
        f"The server failed on this request ({type(error).__name__}: {error}); its log has more."
    )
