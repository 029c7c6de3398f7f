"""The tokenizer of one model folder: text to ids and back, without transformers.

Safe to use from several threads at once. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tp_runtime.errors import ConfigError, InvalidRequestError, TPRuntimeError
from tp_runtime.text import tokenizer_files
from tp_runtime.text.chat_template import ChatTemplate
from tp_runtime.text.detokenizer import (
    REPLACEMENT,
    Detokenizer,
    bytes_of_part,
    detokenizer_factory,
    token_text,
)

SENTENCEPIECE_SPACE = "\u2581"


class Tokenizer:
    """Encodes and decodes as `AutoTokenizer` of transformers does for the same folder.

    Two differences, both towards what a server needs: ids outside the vocabulary are no text
    instead of an error, and `clean_up_tokenization_spaces` (WordPiece models) is not applied."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        """Named special tokens as strings: bos_token, eos_token, ..."""
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that `skip_special_tokens` leaves out of text."""
        self.vocab_size: int = max(tokenizer.get_vocab_size(), *(i + 1 for i in added), 0)
        self._make_detokenizer = detokenizer_factory(tokenizer, self.special_ids)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json and the files beside it; converts older formats once (see
        tokenizer_files). Raises ConfigError with what is missing or broken."""
        path = tokenizer_files.tokenizer_folder(Path(folder))
        try:
            settings = tokenizer_files.read_settings(path)
            named = tokenizer_files.special_token_names(settings)
            templates = tokenizer_files.read_chat_templates(path, settings)
            return cls(
                tokenizer_files.load_tokenizer(path, settings),
                named,
                ChatTemplate(templates, named) if templates else None,
            )
        except TPRuntimeError:
            raise
        except Exception as error:  # fields of any kind may be anywhere in these files
            what = f"{type(error).__name__}: {error}"[:200]
            raise ConfigError(
                f"The tokenizer files in {path} make no sense ({what}); fetch them again."
            ) from error

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """As `from_folder`, but None for a folder without any tokenizer (random test models)."""
        return cls.from_folder(folder) if tokenizer_files.has_tokenizer(Path(folder)) else None

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with special tokens as the tokenizer's post-processor adds them.

        Raises InvalidRequestError for text that is not valid Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text is not valid Unicode (a lone surrogate at character {error.start})."
            ) from error
        # the batch call, other than `encode`, releases the interpreter lock while it works
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary are left out."""
        known = [i for i in token_ids if 0 <= i < 2**32]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """One token as it reads alone, special tokens too; "" outside the vocabulary."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token adds in the middle of a text; they may end within a
        character. Special tokens as they are written; b"" outside the vocabulary."""
        raw = token_text(self._tokenizer, token_id)
        if raw is None:
            return b""
        alone = self.token(token_id)
        if REPLACEMENT in alone:
            return bytes_of_part(raw)
        if raw.startswith(SENTENCEPIECE_SPACE) and not alone.startswith(" "):
            return raw.replace(SENTENCEPIECE_SPACE, " ").encode()  # decoding alone drops it
        return alone.encode()

    def knows(self, token_id: int) -> bool:
        return token_text(self._tokenizer, token_id) is not None

    def detokenizer(
        self, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> Detokenizer:
        """A new incremental detokenizer. `context`: ids of the text that the pushed ids go on
        with, so that a first space is kept; empty: they begin a text of their own."""
        return self._make_detokenizer(skip_special_tokens, context)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of a chat, to be encoded without special tokens: templates write them out.

        Raises InvalidRequestError, also when the model has no template."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "This is a base model without a chat template; use generate with a plain prompt "
                "instead of chat."
            )
        return self.chat_template.render(messages, tools, arguments)
