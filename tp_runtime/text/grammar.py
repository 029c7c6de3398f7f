"""Grammars: which tokens may come next so that the text becomes what a request asked for.

`GrammarCompiler` knows the tokenizer and compiles; a `Grammar` follows one sample, token by token.
The work is done by the library llguidance, whose parser runs outside the interpreter lock and
within limits of its own. Knows nothing of requests, threads or the scheduler.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tp_runtime.errors import InvalidRequestError, RequestFailedError
from tp_runtime.sampling_params import StructuredOutputsParams
from tp_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_LISTED = 256
"""Up to so many allowed ids are listed; more are told as bits."""
KEPT = 16
"""Compiled grammars kept for the next request that asks for the same."""
LEXER_STATES = 50_000
"""Of one grammar, 1 to 2 kB each; a sample whose text would need more ends with an error."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of a JSON text: enough for an indented one. Without a bound, small models are
caught in spaces for ever."""


class TokenMask(NamedTuple):
    """The ids that may come next, as in `messages.RowMask`."""

    bits: bytes = b""
    ids: bytes = b""


class Grammar:
    """One sample's place in its grammar. `end_ids` end the sample; they are allowed exactly where
    the text may end."""

    def __init__(
        self, matcher: LLMatcher, end_ids: Collection[int], eos_ids: Collection[int], size: int
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._eos_ids = eos_ids
        self._size = size

    def copy(self) -> Grammar:
        """Another sample of the same request, from the same place."""
        return Grammar(self._matcher.deep_copy(), self._end_ids, self._eos_ids, self._size)

    def consume(self, token_ids: Iterable[int]) -> None:
        """The text goes on with these tokens; an end id is no part of it. Raises
        RequestFailedError where it may not."""
        for token_id in token_ids:
            if token_id not in self._end_ids and not self._matcher.consume_token(token_id):
                self._fail()

    def next_mask(self) -> TokenMask | None:
        """What may be drawn next; None when the text is complete and nothing may follow.

        Raises RequestFailedError when the grammar is too complex to go on with."""
        matcher = self._matcher
        if matcher.is_error():
            self._fail()
        if matcher.is_stopped():
            return None
        bits = bytearray(matcher.compute_bitmask()[: -(-self._size // 8)])
        if matcher.is_error():
            self._fail()
        _set(bits, self._eos_ids, False)  # llguidance allows its own; ours may be others
        may_end = matcher.is_accepting()
        if not bits.strip(b"\0"):
            if may_end:
                return None
            raise RequestFailedError(
                "No token of this model can go on with the text that structured_outputs asks for."
            )
        if may_end:
            _set(bits, self._end_ids, True)
        return _packed(bytes(bits))

    def _fail(self) -> None:
        reason = _sentence(self._matcher.get_error())
        raise RequestFailedError(f"The output could not be kept to its grammar: {reason}")


def _set(bits: bytearray, ids: Collection[int], value: bool) -> None:
    for i in ids:
        if i // 8 < len(bits):
            bits[i // 8] = bits[i // 8] | 1 << i % 8 if value else bits[i // 8] & ~(1 << i % 8)


def _packed(bits: bytes) -> TokenMask:
    if int.from_bytes(bits, "little").bit_count() > MAX_LISTED:
        return TokenMask(bits=bits)
    ids = array("i")
    for found in re.finditer(rb"[^\0]", bits, re.DOTALL):
        byte, first = found.group()[0], found.start() * 8
        ids.extend(first + bit for bit in range(8) if byte >> bit & 1)
    return TokenMask(ids=ids.tobytes())


class GrammarCompiler:
    """`eos_ids` are the model's; `vocab_size` is the number of its logits: ids that the tokenizer
    does not know are never allowed. Safe to use from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(sorted(i for i in eos_ids if i < vocab_size))
        self._vocab_size = vocab_size
        self._vocabulary: Any = None
        self._own_eos: set[int] = set()
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def load(self) -> None:
        """Builds the tree of all tokens (about 5 us per token, during which no other thread
        runs). Raises InvalidRequestError when llguidance is not installed."""
        if self._vocabulary is not None:
            return
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                "structured_outputs and response_format need the package llguidance, which the "
                f"server does not find ({error}); install it there with `pip install llguidance`."
            ) from None
        vocabulary = _Vocabulary(self._tokenizer, self._eos_ids)
        self._own_eos = {*self._eos_ids, vocabulary.eos_token_id}
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))

    def compile(
        self, wanted: StructuredOutputsParams, stop_ids: Collection[int] = (), ends: bool = True
    ) -> Grammar:
        """The grammar at its beginning. `stop_ids`: further ids that end the sample; `ends`: the
        model's own do.

        Raises InvalidRequestError, one sentence, for what cannot be compiled."""
        self.load()
        key = msgspec.msgpack.encode(wanted)
        matcher = self._kept.get(key)
        if matcher is None:
            matcher = self._kept[key] = self._matcher(wanted)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        end_ids = {*stop_ids, *(self._eos_ids if ends else ())}
        return Grammar(matcher.deep_copy(), end_ids, self._own_eos, self._vocab_size)

    def _matcher(self, wanted: StructuredOutputsParams) -> LLMatcher:
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=LEXER_STATES)
        try:
            source = _source(wanted)
            matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise _refusal(wanted, str(error)) from None
        if matcher.is_error():
            raise _refusal(wanted, matcher.get_error())
        return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        special = set(tokenizer.special_ids)
        if not eos_ids or eos_ids[0] >= len(self.tokens):
            self.tokens.append(b"<|end|>")  # it needs one; this id is never allowed
            eos_ids = (len(self.tokens) - 1,)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special | {i for i in eos_ids if i < len(self.tokens)})
        self._tokenizer = tokenizer

        self._id_of: dict[bytes, int] = {}
        for token_id in reversed(range(tokenizer.vocab_size)):
            if token_id not in special:
                self._id_of[self.tokens[token_id]] = token_id
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids whose bytes are exactly `text`, as the tokenizer would write it inside a text. Where
        only one text can follow, its first token is the only one that is allowed."""
        raw = text.encode() if isinstance(text, str) else bytes(text)
        for before in ("", "\x02"):  # some tokenizers begin a text with a space of their own
            ids = self._encode(before, raw)
            if ids is not None:
                return ids
        return self._longest_matches(raw)

    def _encode(self, before: str, raw: bytes) -> list[int] | None:
        try:
            ids = self._tokenizer.encode(before + raw.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return None
        while before and ids and not self.tokens[ids.pop(0)].endswith(before.encode()):
            pass
        return ids if b"".join(self.tokens[i] for i in ids) == raw else None

    def _longest_matches(self, raw: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(raw):
            for length in range(min(self._longest, len(raw) - at), 0, -1):
                found = self._id_of.get(raw[at : at + length])
                if found is not None:
                    ids.append(found)
                    at += length
                    break
            else:
                break
        return ids


def _source(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    schema = {"type": "object"} if wanted.json is None else wanted.json
    return _schema_source(schema)


def _schema_source(schema: dict[str, Any] | str) -> str:
    """As `LLMatcher.grammar_from_json_schema` with our default, but a large schema does not keep
    the other threads waiting for tens of milliseconds. Raises ValueError."""
    read = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    if not isinstance(read, dict):
        raise ValueError("it must be an object")
    options = read.get("x-guidance", {})
    if isinstance(options, dict):
        read = {**read, "x-guidance": {"whitespace_pattern": WHITESPACE, **options}}
    return msgspec.json.encode({"grammars": [{"json_schema": read}]}).decode()


def _refusal(wanted: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    what = "JSON schema" if wanted.json is not None else "regex" if wanted.regex else "choice"
    return InvalidRequestError(
        f"The {what} cannot be used to constrain the output: {_sentence(reason)}"
    )


def _sentence(text: str) -> str:
    """One line, as llguidance may draw a picture of where an expression is wrong."""
    text = text.partition("<backtrace>")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^")]
    short = " ".join(" ".join(lines).split())
    return (short if len(short) <= 400 else short[:397] + "...").rstrip(".") + "."
