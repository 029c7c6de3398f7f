"""Small tokenizers of every kind in use, trained in milliseconds on the texts below.

`write_folder` makes a model folder's tokenizer files of one, as transformers would read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "The capital of France is Paris. It's where the Seine flows, isn't it?",
    "Größe, Übermut, façade, naïve, Ελληνικά, Привет, как дела?",
    "人工智能正在改变世界。東京は日本の首都です。안녕하세요 세계",
    "नमस्ते दुनिया สวัสดีชาวโลก שלום עולם مرحبا بالعالم",
    "👨‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumbs, 🤷🏼‍♀️ shrug, e\u0301 combining, zero\u200bwidth",
    "def f(x):\n\treturn x ** 2  # spaces   and\ttabs\r\n\n\n",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level(vocab: int = 400) -> Tokenizer:
    """Byte-level BPE: most characters outside ASCII are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:1] + TEXTS[-1:], trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (strip) or Gemma (no strip): rare characters are `<0xE4>` tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for char in sorted(set("▁" + TEXTS[0].replace(" ", "▁") + "Größe")):
        vocab.setdefault(char, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("i", "s"), ("▁", "is"), ("▁", "▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strip else steps
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with the Metaspace decoder (T5-like): no exact form, so the window is used."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", *"abcdefgh", "word"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def llama_2() -> Tokenizer:
    """The older form of `byte_fallback`: spaces are the normalizer's work."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spec = json.loads(tokenizer.to_str())
    spec["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(spec))


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_no_strip": lambda: byte_fallback(strip=False),
    "unigram": unigram,
    "word_piece": word_piece,
    "no_decoder": no_decoder,
}


def write_folder(folder: Path, tokenizer: Tokenizer, model_type: str = "", **settings: Any) -> Path:
    """tokenizer.json, tokenizer_config.json, a config.json for a `model_type`; returns the
    folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
