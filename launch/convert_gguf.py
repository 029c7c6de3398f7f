"""A GGUF file as a folder that `from_pretrained` and this runtime read; loads torch and transformers.

    python -m tp_runtime.launch.convert_gguf FILE.gguf FOLDER

transformers dequantises the weights. What it makes of the rest is put right here from the file's
own fields: it takes the begin token for the end token, splits no digits (`smollm` does) and decodes
through a sentencepiece-like chain. Made for the demo's model, a llama with a byte-level tokenizer;
other kinds are refused. Knows nothing of caches and downloads (`demo_model`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

_NORMAL_TOKEN = 1  # gguf.TokenType.NORMAL
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json (with the chat template) into `folder`.

    float32, so that every device and TP size sees the same numbers. Raises ValueError for a file
    of another kind, and what transformers raises."""
    from gguf import GGUFReader

    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"]
    if kind != ("llama", "gpt2") or fields["tokenizer.ggml.pre"] not in _PRE_TOKENIZERS:
        raise ValueError(f"{gguf} holds {kind}, not a llama with a known byte-level tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(gguf, folder, fields)
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def _write_model(gguf: Path, folder: Path, fields: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    ids = _special_ids(fields)
    config = model.config
    config.name_or_path = gguf.name.partition(".")[0]
    # The file holds a float32; the model was trained with the decimal number.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    for name, value in ids.items():
        setattr(config, f"{name}_token_id", value)
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"]
    )
    model.save_pretrained(folder)


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {short: int(fields[f"tokenizer.ggml.{long}_token_id"]) for short, long in names.items()}


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json, as GPT-2's byte-level BPE with the digits rule the file names."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    before = _PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags, "special": True}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != _NORMAL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*before, {**_BYTE_LEVEL, "trim_offsets": True}],
        },
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = {f"{name}_token": tokens[i] for name, i in _special_ids(fields).items()}
    return {
        # Takes tokenizer.json as it is; GPT2Tokenizer would put its own rules in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _end_with_parent() -> None:
    """Ends this process within half a second of its parent, also when that was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
