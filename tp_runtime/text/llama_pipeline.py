"""Llama's sentencepiece tokenizers, as transformers 5 builds them.

For a Llama model whose config names LlamaTokenizer, transformers takes only vocabulary and merges
from tokenizer.json and makes normalizer, pre-tokenizer and decoder anew (`LlamaTokenizer`). The
published files of Llama 2 and its kin are of an older form, in which text after a special token
begins with a space of its own; chat prompts would get other ids than transformers gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")


def needs_llama_pipeline(
    tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], model_type: str
) -> bool:
    """Whether transformers would rebuild this tokenizer. Byte-level ones under this name (some
    distilled models) are left as their file says: rebuilt, they could not read text at all."""
    return (
        settings.get("tokenizer_class") in _CLASSES
        and model_type in ("llama", "")
        and tokenizer.token_to_id("<0x00>") is not None
    )


def set_llama_pipeline(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """`add_prefix_space` (true unless given): text begins with a space; `legacy` (false unless
    given): so does every part between special tokens."""
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = ("always" if settings.get("legacy", False) else "first") if prefix else "never"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
