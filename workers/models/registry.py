"""Builds the model that a config names. The table itself is `tp_runtime.architectures`."""

from __future__ import annotations

import dataclasses
import importlib
import logging

import torch

from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.rotary import RopeParameters, RotaryEmbedding
from tp_runtime.workers.models.decoder import CausalLM, Placement

logger = logging.getLogger(__name__)


def build_model(
    config: ModelConfig,
    group: TPGroup,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: AttentionBackend,
    max_model_len: int,
) -> CausalLM:
    """This rank's share of the model, parameters uninitialised (`load_weights` fills them).

    `max_model_len` is the number of positions in the rotary table. Raises ConfigError when the
    model cannot be split over this many ranks."""
    model_class = getattr(importlib.import_module(config.module), config.architecture)
    rope = RopeParameters(**dataclasses.asdict(config.rope))
    if group.rank == 0:
        _log_choices(config, max_model_len)
    place = Placement(group, dtype, torch.device(device), backend)
    try:
        rotary = RotaryEmbedding(config.head_dim, rope, max_model_len, device=place.device)
        model: CausalLM = model_class(config, rotary, place)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return model


def _log_choices(config: ModelConfig, max_model_len: int) -> None:
    """What a reader of config.json might expect to be otherwise."""
    if config.rope.type == "dynamic":
        logger.info(
            "Rotary scaling 'dynamic' is computed once, for sequences of %d tokens "
            "(--max-model-len): keys in the cache cannot be rotated again as a sequence grows.",
            max_model_len,
        )
    if config.ignored_fields:
        logger.info(
            "Unknown fields of config.json, ignored as transformers ignores them: %s.",
            ", ".join(config.ignored_fields),
        )
