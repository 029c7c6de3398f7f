"""What a model folder says about its model: config.json in our own frozen form.

Read as transformers 5 reads it, without torch and without transformers: the coordinator, the
launcher and every worker make the same ModelConfig from the same files. Fields that would change
the mathematics and are not implemented are refused by name. Knows nothing of ranks or weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tp_runtime.architectures import ARCHITECTURES, Architecture, find_architecture
from tp_runtime.config_reader import ConfigReader, read_json_object, short
from tp_runtime.errors import ConfigError
from tp_runtime.rope_config import RopeConfig, read_rope
from tp_runtime.unsupported_fields import check_remaining_fields

_LAYER_TYPES = ("full_attention", "sliding_attention")
MOST_LAYERS = 10_000
"""Far above any model; there is a list as long as this number."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Sizes are those of the whole model, not of a rank's share."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Positions without asking for more (`max_position_embeddings`)."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    """Of q, k and v."""
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Per layer: tokens a token sees, itself included; None: all."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json where it names any, else from config.json."""
    bos_token_id: int | None
    dtype: str
    """Of the checkpoint, as torch spells it; float32 where config.json does not say."""
    vocabulary: str = ""
    """SHA-256 of the tokenizer's files, empty without any; part of what ranks compare."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only this architecture reads (`Architecture.extra`)."""
    ignored_fields: tuple[str, ...] = ()
    """Unknown fields of config.json, ignored as transformers ignores them; worth a log line."""

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads config.json, generation_config.json and the tokenizer's digest.

        Raises ConfigError, one sentence: no such folder or file, bad JSON, an architecture that is
        not known, a field with a bad value, or one that is not implemented."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; give the folder of a model.")
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise ConfigError(_no_config(folder))
        generation_file = folder / "generation_config.json"
        generation = read_json_object(generation_file) if generation_file.is_file() else {}
        return cls.from_dict(
            read_json_object(config_file),
            generation,
            where=str(config_file),
            vocabulary=_vocabulary_digest(folder),
        )

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        *,
        where: str = "config.json",
        vocabulary: str = "",
    ) -> ModelConfig:
        """From the objects in config.json and generation_config.json; ConfigError as above."""
        arch = find_architecture(config, where)
        reader = ConfigReader(config, {**arch.defaults, **arch.extra}, where)
        num_layers = reader.integer("num_hidden_layers", high=MOST_LAYERS)
        hidden_size = reader.integer("hidden_size")
        num_heads = reader.integer("num_attention_heads")
        head_dim = _head_dim(reader, hidden_size, num_heads)
        max_position = reader.integer("max_position_embeddings")
        attention_bias = _bias(reader, "attention_bias", arch.attention_bias, arch)
        out_fixed = arch.attention_out_bias
        _check_activation(reader)
        model = cls(
            architecture=arch.name,
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, num_heads),
            head_dim=head_dim,
            vocab_size=reader.integer("vocab_size"),
            max_position=max_position,
            rms_norm_eps=reader.number("rms_norm_eps"),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=attention_bias,
            attention_out_bias=attention_bias if out_fixed is None else out_fixed,
            mlp_bias=_bias(reader, "mlp_bias", arch.mlp_bias, arch),
            qk_norm=arch.qk_norm,
            rope=read_rope(reader, head_dim, max_position, _LAYER_TYPES),
            windows=_windows(reader, arch, num_layers),
            eos_token_ids=_eos_token_ids(reader, generation or {}),
            bos_token_id=reader.optional_integer("bos_token_id", low=0),
            dtype=_dtype(reader),
            vocabulary=vocabulary,
            extra={name: reader.raw(name) for name in arch.extra},
        )
        ignored = check_remaining_fields(reader.remaining(), where)
        return replace(model, ignored_fields=ignored)

    @property
    def module(self) -> str:
        """The workers' module that holds this architecture."""
        return ARCHITECTURES[self.architecture].module

    @property
    def longest_context(self) -> int:
        """Positions a user may ask for: more than `max_position` with some rotary scalings."""
        return self.rope.longest_context

    @property
    def num_parameters(self) -> int:
        """Elements of the checkpoint's tensors, a tied head counted once."""
        hidden, inter, head = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * head, self.num_kv_heads * head
        layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inter + 2 * hidden
        layer += (q + 2 * kv) if self.attention_bias else 0
        layer += hidden if self.attention_out_bias else 0
        layer += (2 * inter + hidden) if self.mlp_bias else 0
        layer += 2 * head if self.qk_norm else 0
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * hidden + hidden


def _no_config(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return (
            f"{folder} holds GGUF files, which are not read; give a folder with config.json and "
            "*.safetensors."
        )
    return (
        f"{folder} has no config.json; give the folder of a Hugging Face model (config.json, "
        "tokenizer.json, *.safetensors)."
    )


def _vocabulary_digest(folder: Path) -> str:
    """Of the first tokenizer file that is there; JSON and merges alike are read as bytes."""
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return ""


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    given = reader.optional_integer("head_dim")
    if given is None and hidden_size % num_heads:
        raise ConfigError(
            f"{reader.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads} and no head_dim is given."
        )
    return given or hidden_size // num_heads


def _num_kv_heads(reader: ConfigReader, num_heads: int) -> int:
    given = reader.optional_integer("num_key_value_heads") or num_heads
    if num_heads % given:
        raise ConfigError(
            f"{reader.where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {given}."
        )
    return given


def _bias(reader: ConfigReader, name: str, fixed: bool | None, arch: Architecture) -> bool:
    """The architecture's own value, or the field's; a field that contradicts is refused."""
    if fixed is None:
        return reader.flag(name)
    if reader.raw(name) is not None and reader.flag(name) != fixed:
        raise ConfigError(
            f"{reader.where}: {name}={reader.flag(name)} is not possible; "
            f"{arch.name} always has {name}={fixed}."
        )
    return fixed


def _check_activation(reader: ConfigReader) -> None:
    given = reader.raw("hidden_act")
    if given not in ("silu", "swish"):
        raise ConfigError(
            f"{reader.where}: hidden_act {short(given)} is not implemented; implemented is 'silu'."
        )


def _windows(reader: ConfigReader, arch: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, by the architecture's rule."""
    types = _layer_types(reader, num_layers)
    window = reader.optional_integer("sliding_window")
    if arch.windows == "by_layer":
        window = window if reader.flag("use_sliding_window") else None
        first = reader.optional_integer("max_window_layers", low=0) or 0
        if types is None:
            sliding = [window is not None and layer >= first for layer in range(num_layers)]
        else:
            sliding = [kind == "sliding_attention" for kind in types]
    else:
        sliding = [arch.windows == "every_layer" and window is not None] * num_layers
        if arch.windows == "none" and window is not None:
            raise ConfigError(
                f"{reader.where}: sliding_window={window} is not implemented for {arch.name}; "
                "it attends to everything."
            )
        if types is not None and [kind == "sliding_attention" for kind in types] != sliding:
            raise ConfigError(
                f"{reader.where}: layer_types that differ from layer to layer are not implemented "
                f"for {arch.name}."
            )
    if any(sliding) and window is None:
        raise ConfigError(
            f"{reader.where}: layer_types names sliding_attention and no sliding_window is in use "
            "(sliding_window, use_sliding_window)."
        )
    return tuple(window if slides else None for slides in sliding)


def _layer_types(reader: ConfigReader, num_layers: int) -> list[str] | None:
    types = reader.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.wrong("layer_types", types, f"a list of {num_layers} layer types")
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise ConfigError(
                f"{reader.where}: layer type {short(kind)} is not implemented; "
                f"implemented are {', '.join(_LAYER_TYPES)}."
            )
    return types


def _eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> tuple[int, ...]:
    own = reader.raw("eos_token_id")
    given = generation.get("eos_token_id")
    ids = own if given is None else given
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise reader.wrong("eos_token_id", ids, "a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))


def _dtype(reader: ConfigReader) -> str:
    given = reader.raw("dtype") or reader.raw("torch_dtype") or "float32"
    if not isinstance(given, str):
        raise reader.wrong("dtype", given, 'a name such as "bfloat16"')
    return given.removeprefix("torch.")
