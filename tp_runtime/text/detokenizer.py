"""Ids to text, a few at a time: what is pushed in pieces reads like one decode of everything.

Three forms, chosen from the `decoder` of tokenizer.json by `detokenizer_factory`:

- byte-level BPE: every token is a fixed string of bytes, so text is an incremental UTF-8 decode;
- sentencepiece-like with byte fallback (`<0xE4>` tokens): a run of byte tokens is text only if the
  whole run is valid UTF-8, so a run is held back until a token of another kind ends it;
- anything else: a window of the last tokens is decoded twice, with and without the new ones.

The first two cost the same for every token, however long the text. Ids that the tokenizer does not
know (`vocab_size` of the model may be larger) are no text and change nothing.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

REPLACEMENT = "\ufffd"
_MAX_WINDOW = 256
"""Tokens that `WindowDetokenizer` holds back at most while its text ends in U+FFFD."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(ABC):
    """The text of one sample. `push` returns what is certain by now, `finish` the rest."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str: ...

    def push_one(self, token_id: int) -> str:
        """As `push` with one id, the way of almost every token of a stream."""
        return self.push((token_id,))

    @abstractmethod
    def finish(self) -> str: ...


DetokenizerFactory = Callable[[bool, Sequence[int]], Detokenizer]
"""(skip_special_tokens, ids of the text that the sample goes on with) -> a new detokenizer."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 is itself, the others follow
    from U+0100 on (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    return chars | {chr(0x100 + i): b for i, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of one token of a byte-level vocabulary; added tokens in plain text are kept."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def bytes_of_part(token: str) -> bytes:
    """The bytes of a token that is no whole character: `<0xE4>`, or one of a byte-level BPE."""
    named = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(named.group(1), 16)]) if named else byte_level_bytes(token)


class _Pieces(dict[int, Any]):
    """id -> piece, worked out at the first use of an id; `nothing` for skipped and unknown ids."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        skipped: frozenset[int],
        convert: Callable[[str], Any],
        nothing: Any,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._convert = convert
        self._nothing = nothing

    def __missing__(self, token_id: int) -> Any:
        token = token_text(self._tokenizer, token_id)
        piece = self._nothing
        if token is not None and token_id not in self._skipped:
            piece = self._convert(token)
        if token is not None:  # unknown ids are not kept: there may be any number of them
            self[token_id] = piece
        return piece


def token_text(tokenizer: tokenizers.Tokenizer, token_id: int) -> str | None:
    """The token's own string, None for an id outside the vocabulary (negative ones too)."""
    if not 0 <= token_id < 2**32:
        return None
    token: str | None = tokenizer.id_to_token(token_id)
    return token


class ByteLevelDetokenizer(Detokenizer):
    """For byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM).

    A piece is the bytes of a token and, if they are whole characters, their text."""

    def __init__(self, pieces: dict[int, tuple[bytes, str | None]]) -> None:
        self._pieces = pieces
        self._rest = b""
        """The first bytes of a character whose last ones are not there yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[i][0] for i in token_ids]), final=False)

    def push_one(self, token_id: int) -> str:
        data, text = self._pieces[token_id]
        if text is not None and not self._rest:
            return text
        return self._decode(data, final=False)

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text


class ByteFallbackDetokenizer(Detokenizer):
    """For sentencepiece-like vocabularies with byte tokens (Llama 2, Mistral, Gemma).

    A piece is text, an int for a byte token, or None. `strip` is the number of leading spaces that
    a text loses; 0 when the text goes on with another one."""

    def __init__(self, pieces: dict[int, str | int | None], strip: int, content: str) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip = strip
        self._content = content

    def push(self, token_ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                out.append(self._end_run())
            out.append(piece)
        return self._stripped("".join(out))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._content):
                self._strip = 0
                break
            text = text[len(self._content) :]
            self._strip -= 1
        return text


class WindowDetokenizer(Detokenizer):
    """For any other decoder: the text of the window with the new tokens, less that without them.

    Right for decoders whose text for a token depends on its neighbours and on being the first
    (WordPiece, Metaspace, BPE suffixes). Text that ends in U+FFFD is held back until more tokens
    show what it is, for up to `_MAX_WINDOW` tokens."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, skipped: frozenset[int], context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = self._visible(context)[-8:]
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        return self._advance(token_ids, final=False)

    def finish(self) -> str:
        return self._advance((), final=True)

    def _advance(self, token_ids: Sequence[int], final: bool) -> str:
        new = self._visible(token_ids)
        if not new and not final:
            return ""
        self._ids += new
        before, now = self._text(self._ids[: self._read]), self._text(self._ids)
        unclear = now.endswith(REPLACEMENT) and len(self._ids) - self._read < _MAX_WINDOW
        if unclear and not final:
            return ""
        del self._ids[: self._read]
        self._read = len(self._ids)
        return now[len(before) :]

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        return [
            i
            for i in token_ids
            if i not in self._skipped and token_text(self._tokenizer, i) is not None
        ]

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def detokenizer_factory(
    tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]
) -> DetokenizerFactory:
    """Chooses the detokenizer for this tokenizer's decoder; pieces are shared by all samples."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_factory(tokenizer, special_ids)
    fallback = _ByteFallback.read(steps)
    if fallback is not None:
        return fallback.factory(tokenizer, special_ids)
    return lambda skip, context: WindowDetokenizer(
        tokenizer, special_ids if skip else frozenset(), context
    )


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    spec: dict[str, Any] = json.loads(decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _byte_level_piece(token: str) -> tuple[bytes, str | None]:
    data = byte_level_bytes(token)
    try:
        return data, data.decode()
    except UnicodeDecodeError:
        return data, None


def _byte_level_factory(
    tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]
) -> DetokenizerFactory:
    nothing = (b"", "")
    skipping = _Pieces(tokenizer, special_ids, _byte_level_piece, nothing)
    everything = _Pieces(tokenizer, frozenset(), _byte_level_piece, nothing)
    return lambda skip, context: ByteLevelDetokenizer(skipping if skip else everything)


class _ByteFallback:
    """The decoder steps Replace* ByteFallback Fuse Strip?, the only form in use."""

    def __init__(self, replacements: list[tuple[str, str]], strip: int, content: str) -> None:
        self._replacements = replacements
        self._strip = strip
        self._content = content

    @classmethod
    def read(cls, steps: list[dict[str, Any]]) -> _ByteFallback | None:
        replacements = []
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
            steps = steps[1:]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteFallback", "Fuse"]:
            return cls(replacements, 0, "")
        if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
            return cls(replacements, steps[2]["start"], steps[2]["content"])
        return None

    def factory(
        self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]
    ) -> DetokenizerFactory:
        skipping = _Pieces(tokenizer, special_ids, self._piece, None)
        everything = _Pieces(tokenizer, frozenset(), self._piece, None)

        def make(skip: bool, context: Sequence[int]) -> Detokenizer:
            strip = 0 if context else self._strip
            return ByteFallbackDetokenizer(skipping if skip else everything, strip, self._content)

        return make

    def _piece(self, token: str) -> str | int:
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token)
        return int(match[1], 16) if match else token
