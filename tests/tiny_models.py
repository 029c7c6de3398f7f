"""Tiny random models for tests: `make_tiny("qwen3", folder)` writes a folder that loads anywhere.

A folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json (byte-level BPE, ChatML template), as a model on the hub does. *Every*
parameter is random: norms 1 + 0.3 N, biases too, so that dropping any of them shows. Names are
those of transformers; transformers itself is not imported (it takes seconds).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TOKENIZER_SIZE = 320
"""Tokens of the tiny tokenizer, special ones included; the models' vocabularies are larger."""
END_ID = TOKENIZER_SIZE - 1
"""`<|im_end|>`, the end id of the tiny models."""

_COMMON: dict[str, Any] = {
    "vocab_size": 331,  # odd, and larger than the tokenizer
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "torch_dtype": "float32",
}
_KINDS: dict[str, dict[str, Any]] = {
    # head_dim is not hidden_size / heads = 16: the architecture sets it explicitly.
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "attention_bias": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
}
KINDS = tuple(_KINDS)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Where does the time go when nobody looks? "
    "A worker holds its shard of every layer; the coordinator holds the truth about requests. "
    "Der schnelle braune Fuchs springt über den faulen Hund. Où est passé le temps ? "
    "123 456 7890, (a + b) * c = d; naïve café, 你好，世界！ こんにちは 🙂🚀 "
) * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_config(kind: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; `overrides` replace or add fields (hub names)."""
    return {"model_type": kind, **_COMMON, **_KINDS[kind], **overrides}


def make_tiny(
    kind: str,
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat_template: bool = True,
    extra_tensors: Mapping[str, Tensor] | None = None,
    **overrides: Any,
) -> Path:
    """Writes a tiny model of `kind` (see KINDS) into `folder` and returns it.

    `overrides` are fields of config.json; `shards` > 1 writes an index and that many files;
    `extra_tensors` are added to the checkpoint (or replace tensors of it). Same arguments, same
    bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(kind, **overrides)
    write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", generation)
    tensors = {**random_tensors(config, seed, dtype), **(extra_tensors or {})}
    write_checkpoint(folder, tensors, shards)
    write_tokenizer(folder, chat_template=chat_template)
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that transformers expects for this config.json."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kind = config["model_type"]
    qkv_bias = kind == "qwen2" or bool(config.get("attention_bias"))
    out_bias = kind != "qwen2" and bool(config.get("attention_bias"))
    mlp_bias = bool(config.get("mlp_bias"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, heads * head_dim, out_bias),
            "mlp.gate_proj": (inter, hidden, mlp_bias),
            "mlp.up_proj": (inter, hidden, mlp_bias),
            "mlp.down_proj": (hidden, inter, mlp_bias),
        }
        prefix = f"model.layers.{layer}."
        for name, (outputs, inputs, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if kind == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def random_tensors(
    config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Every tensor of the checkpoint at random: norms 1 + 0.3 N, biases 0.3 N, matrices scaled so
    that activations keep their size, embeddings N and a head that spreads the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        elif name.endswith(".bias"):
            noise = 0.3 * noise
        elif "embed_tokens" not in name:
            noise = noise * (1.5 / shape[1] ** 0.5)
        tensors[name] = noise.to(dtype)
    return tensors


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], shards: int = 1) -> None:
    """model.safetensors, or `shards` files and their index, names dealt out in turn."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, *, chat_template: bool = True) -> None:
    """A byte-level BPE of TOKENIZER_SIZE tokens trained on CORPUS; the last three are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == TOKENIZER_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
    }
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    write_json(folder / "tokenizer_config.json", settings)
