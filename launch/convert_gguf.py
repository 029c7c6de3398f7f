"""A GGUF file of a llama as a folder of safetensors that `from_pretrained` and this runtime read.

    python -m tp_runtime.launch.convert_gguf FILE.gguf FOLDER

Made for the demo's model: a llama with a byte-level tokenizer; other kinds are refused. It loads
gguf and numpy only and takes 7 s where reading the file through transformers takes 45 s, which
besides takes the begin token for the end token, splits no digits (`smollm` does) and decodes
through a sentencepiece-like chain. A test compares the weights with those transformers reads.
Knows nothing of caches and downloads (`demo_model`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

_NORMAL_TOKEN = 1  # gguf.TokenType.NORMAL
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors (float32), tokenizer.json and
    tokenizer_config.json (with the chat template) into `folder`.

    float32, so that every device and TP size sees the same numbers. Raises ValueError for a file
    of another kind."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"]
    if kind != ("llama", "gpt2") or fields["tokenizer.ggml.pre"] not in _PRE_TOKENIZERS:
        raise ValueError(f"{gguf} holds {kind}, not a llama with a known byte-level tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(reader.tensors, fields)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _model_config(fields, weights))
    ids = {f"{name}_token_id": value for name, value in _special_ids(fields).items()}
    del ids["unk_token_id"]
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer.json", _tokenizer(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))


def _weights(tensors: list[Any], fields: dict[str, Any]) -> Weights:
    """All tensors under the names of a transformers checkpoint, dequantised."""
    from gguf import dequantize

    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights: Weights = {}
    for tensor in tensors:
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        value = value.reshape([int(size) for size in reversed(tensor.shape)])
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            value = _rotary_halves(value, heads[part])
        weights[_checkpoint_name(tensor.name)] = np.ascontiguousarray(value)
    return weights


def _checkpoint_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    raise ValueError(f"the GGUF file holds a tensor that is not of a plain llama: {name}")


def _rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * D, in]: GGUF keeps the two numbers that are rotated together side by side, a
    transformers checkpoint keeps them D/2 rows apart."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _model_config(fields: dict[str, Any], weights: Weights) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    ids = {f"{name}_token_id": value for name, value in _special_ids(fields).items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        # The file holds it as float32; the model was trained with the decimal number.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "rope_theta": float(fields["llama.rope.freq_base"]),
            "rope_type": "default",
        },
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        **ids,
    }


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
