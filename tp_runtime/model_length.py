"""How long a sequence of a server may be: what the user asks for and what the model can do."""

from __future__ import annotations

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest sequence, prompt and output together; `max_position` unless asked.

    Every process computes it for itself. Raises ConfigError beyond what the model was made for."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.longest_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than the {model.longest_context} "
            "positions of this model; lower it."
        )
    return config.max_model_len
