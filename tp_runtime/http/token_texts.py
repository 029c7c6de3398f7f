"""Log-probabilities in the two shapes of OpenAI's API, and the texts of tokens that they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tp_runtime.messages import Logprob, TokenLogprobs
from tp_runtime.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenTexts:
    """Token ids as the API shows them; each is looked up once.

    A token that is not whole characters reads `bytes:\\xe4\\xbd` as with OpenAI, so that different
    tokens have different texts; without a tokenizer `token_id:17`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token_id: int) -> str:
        return self._look(token_id)[0]

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._look(token_id)[1])

    def _look(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._make(token_id)
        return known

    def _make(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None or not self._tokenizer.knows(token_id):
            return f"token_id:{token_id}", b""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class CompletionLogprobs:
    """The lists of one choice of a completion; `offset` goes on from chunk to chunk."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._offset = 0

    def lists(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """One entry per token; None for the first of a prompt, which follows nothing."""
        tokens = [self._texts.text(i) for i in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if p is None else finite(p.chosen) for p in logprobs],
            "tokens": tokens,
            "top_logprobs": [None if p is None else self._alternatives(p) for p in logprobs],
        }

    def _alternatives(self, token: TokenLogprobs) -> dict[str, float]:
        """The most likely ones and, in any case, the chosen one."""
        found = {self._texts.text(p.token_id): finite(p) for p in token.top[: self._top]}
        found.setdefault(self._texts.text(token.chosen.token_id), finite(token.chosen))
        return found


def chat_logprobs(
    texts: TokenTexts, logprobs: list[TokenLogprobs] | None, top: int
) -> dict[str, Any]:
    """`{"content": [...]}` with `top` alternatives for each token."""
    entries = []
    for token in logprobs or []:
        entry = _chat_entry(texts, token.chosen)
        entry["top_logprobs"] = [_chat_entry(texts, p) for p in token.top[:top]]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def _chat_entry(texts: TokenTexts, logprob: Logprob) -> dict[str, Any]:
    token_id = logprob.token_id
    return {
        "token": texts.text(token_id),
        "logprob": finite(logprob),
        "bytes": texts.bytes_of(token_id),
    }
