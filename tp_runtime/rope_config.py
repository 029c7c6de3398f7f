"""Rotary-embedding settings of a config.json, old style and new.

New: `rope_parameters`. Old: `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside the
other fields. Read as transformers 5 reads them; the frequencies themselves are computed in ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tp_runtime.config_reader import ConfigReader, short
from tp_runtime.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
DEFAULT_THETA = 10_000.0
_KNOWN_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings "
    "low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim attention_factor "
    "truncate finetuned".split()
)


@dataclass(frozen=True)
class RopeConfig:
    """Named and ordered as `tp_runtime.ops.rotary.RopeParameters`, which workers make of it."""

    type: str
    theta: float
    dim: int
    """Rotated dimensions of a head, from the first on; the rest passes through."""
    max_position: int
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def longest_context(self) -> int:
        """Positions that the scaling stretches the model to, at least `max_position`.

        Where `max_position_embeddings` states the stretched length already (hub configs differ)
        this allows more than the model was made for, and no user gets it without asking."""
        if self.type in ("linear", "dynamic"):
            return max(self.max_position, int(self.max_position * self.factor))
        if self.type == "yarn" and self.original_max_position is not None:
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position


def read_rope(
    config: ConfigReader, head_dim: int, max_position: int, layer_types: Iterable[str] = ()
) -> RopeConfig:
    """The rotary settings of a config.json.

    Raises ConfigError for a type that is not implemented, settings per layer type, and missing or
    unknown fields. With `partial_rotary_factor` the first `int(head_dim * factor)` dimensions of a
    head are rotated, as in Phi and GLM. (transformers' classes of our four architectures drop the
    field when the type is "default" and fail on it otherwise.)"""
    given = _rope_object(config)
    if set(given) & set(layer_types):
        raise ConfigError(
            f"{config.where}: rope_parameters differ by layer type ({', '.join(given)}), which is "
            "not implemented; only one setting for all layers is."
        )
    rope = ConfigReader(given, {}, f"rope_parameters in {config.where}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{rope.where}: rope_type {short(kind)} is not implemented; "
            f"implemented are {', '.join(ROPE_TYPES)}."
        )
    unknown = [key for key, value in given.items() if key not in _KNOWN_KEYS and value is not None]
    if unknown:
        raise ConfigError(
            f"{rope.where}: {', '.join(sorted(unknown))} is not known and may change the results; "
            "remove the field if the model does not need it."
        )
    dim = _rotated_dimensions(config, rope, head_dim)
    theta = rope.optional_number("rope_theta") or config.optional_number("rope_theta")
    settings = _scaling(config, rope, kind, max_position)
    return RopeConfig(kind, theta or DEFAULT_THETA, dim, max_position, **settings)


def _rope_object(config: ConfigReader) -> dict[str, Any]:
    """`rope_scaling` where it says something, else `rope_parameters` (transformers' order)."""
    new = config.raw("rope_parameters")
    old = config.raw("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise config.wrong(name, value, "an object or null")
    return old or new or {}


def _rotated_dimensions(config: ConfigReader, rope: ConfigReader, head_dim: int) -> int:
    outside = config.optional_number("partial_rotary_factor")
    fraction = rope.optional_number("partial_rotary_factor") or outside or 1.0
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"{config.where}: partial_rotary_factor {fraction:g} of head_dim {head_dim} is {dim} "
            "rotated dimensions; it must be an even number from 2 to the head size."
        )
    return dim


def _scaling(
    config: ConfigReader, rope: ConfigReader, kind: str, max_position: int
) -> dict[str, Any]:
    """The fields of RopeConfig that this type uses."""
    beside = config.optional_integer("original_max_position_embeddings")
    if kind == "default":
        return {}
    if kind in ("linear", "dynamic"):
        return {"factor": rope.number("factor")}
    original = beside or rope.optional_integer("original_max_position_embeddings") or max_position
    if kind == "llama3":
        return {
            "factor": rope.number("factor"),
            "original_max_position": original,
            "low_freq_factor": rope.number("low_freq_factor"),
            "high_freq_factor": rope.number("high_freq_factor"),
        }
    truncate = rope.raw("truncate", True)
    if not isinstance(truncate, bool):
        raise rope.wrong("truncate", truncate, "true or false")
    # 0 and null both mean "not given", as in transformers; the defaults are the paper's.
    return {
        "factor": rope.optional_number("factor") or max_position / original,
        "original_max_position": original,
        "beta_fast": rope.optional_number("beta_fast", zero_is_absent=True) or 32.0,
        "beta_slow": rope.optional_number("beta_slow", zero_is_absent=True) or 1.0,
        "mscale": rope.optional_number("mscale", zero_is_absent=True),
        "mscale_all_dim": rope.optional_number("mscale_all_dim", zero_is_absent=True),
        "attention_factor": rope.optional_number("attention_factor"),
        "truncate": truncate,
    }
