"""The model architectures this runtime knows: the one table to add a line to.

Each entry says what transformers assumes where a config.json is silent, which fields the
architecture reads, and in which module of the workers the model is written (a name: this file
imports no torch, so that the coordinator can read configs). See docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tp_runtime.config_reader import short
from tp_runtime.errors import ConfigError

WindowRule = Literal["none", "every_layer", "by_layer"]


@dataclass(frozen=True)
class Architecture:
    """What distinguishes one `architectures` entry of config.json from another.

    A bias that is True or False is fixed by the architecture; None leaves it to the field of that
    name in config.json (the bias of o_proj follows `attention_bias`). `windows` says which layers
    have the sliding window: none, every layer, or `layer_types` (Qwen's rule where that is absent).
    `extra` are further fields the model reads, with the value transformers assumes."""

    name: str
    """The class in `module`, and the entry of `architectures` in config.json."""
    model_type: str
    module: str
    defaults: Mapping[str, Any]
    attention_bias: bool | None = False
    attention_out_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    windows: WindowRule = "none"
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_MODELS = "tp_runtime.workers.models"
_SMALL_EPS: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN: dict[str, Any] = {
    **_SMALL_EPS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LLAMA: dict[str, Any] = {
    **_SMALL_EPS,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_KNOWN = (
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        module=f"{_MODELS}.qwen3",
        defaults={**_QWEN, "head_dim": 128},
        attention_bias=None,
        attention_out_bias=None,
        qk_norm=True,
        windows="by_layer",
    ),
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        module=f"{_MODELS}.llama",
        defaults=_LLAMA,
        attention_bias=None,
        attention_out_bias=None,
        mlp_bias=None,
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        module=f"{_MODELS}.qwen2",
        defaults=_QWEN,
        attention_bias=True,
        windows="by_layer",
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        module=f"{_MODELS}.mistral",
        defaults={
            **_LLAMA,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        windows="every_layer",
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({a.name: a for a in _KNOWN})


def find_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """The architecture a config.json names.

    Raises ConfigError listing the known ones, or when `model_type` belongs to another one."""
    given = config.get("architectures")
    names = [name if isinstance(name, str) else short(name) for name in _listed(given)]
    found = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if found is None:
        said = ", ".join(names[:4]) if given else "none"
        raise ConfigError(
            f"{where} names the architecture {said}, which this runtime does not know; "
            f"it knows {', '.join(ARCHITECTURES)} (docs/adding-a-model.md shows how to add one)."
        )
    model_type = config.get("model_type", found.model_type)
    if model_type != found.model_type:
        raise ConfigError(
            f"{where} names the architecture {found.name} and the model_type {short(model_type)}; "
            f"{found.name} belongs to model_type {found.model_type!r}."
        )
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
