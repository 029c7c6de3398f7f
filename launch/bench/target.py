"""Which model a benchmark runs: a folder, a hub name, or a known shape with random weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch.bench.shapes import SHAPES, shape_folder
from tp_runtime.launch.options import engine_config, engine_options, take_engine_options
from tp_runtime.launch.preflight import preflight
from tp_runtime.model_config import ModelConfig

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)
"""Of counts and lengths that make no measurement when they are 0."""


@dataclass(frozen=True)
class Target:
    """`name` for tables; `config` has device and folder resolved."""

    name: str
    config: EngineConfig
    model: ModelConfig

    @property
    def dtype(self) -> str:
        """What the workers will compute in."""
        if self.config.dtype != "auto":
            return self.config.dtype
        return "float32" if self.config.device == "cpu" else self.model.dtype

    def conditions(self) -> dict[str, Any]:
        config = self.config
        return {
            "model": self.name,
            "dtype": self.dtype,
            "device": config.device,
            "tensor_parallel_size": config.tensor_parallel_size,
            "weights": "random" if config.load_format == "dummy" else "checkpoint",
            "enforce_eager": config.enforce_eager,
            "attention_backend": config.attention_backend,
            "sampling": config.sampling,
            "run_ahead": config.run_ahead,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
        }


def target_options(function: F) -> F:
    """Decorator: MODEL or --shape, and the flags of a server that the command does not define
    itself (it stands below)."""
    own = {option.name for option in getattr(function, "__click_params__", ())}
    function = engine_options(function)
    params: list[click.Parameter] = function.__click_params__  # type: ignore[attr-defined]
    spellings: set[str] = set()
    for param in list(params):  # the command's own came first
        if param.name not in own and spellings & set(param.opts):
            params.remove(param)
        spellings |= set(param.opts)
    shape = click.Choice(list(SHAPES))
    function = click.option("--shape", type=shape, help="Random weights in this shape.")(function)
    return click.argument("model", required=False)(function)


@contextlib.contextmanager
def open_target(model: str | None, options: dict[str, Any], **forced: Any) -> Iterator[Target]:
    """Takes the options of `target_options` out of `options`. `forced` are settings that the
    benchmark prescribes. Raises ConfigError."""
    settings = take_engine_options(options) | forced
    shape = options.pop("shape")
    if bool(model) == bool(shape):
        raise ConfigError("Give a model folder (or hub name), or --shape, one of the two.")
    with contextlib.ExitStack() as stack:
        if shape:
            settings["load_format"] = "dummy"
            model = str(stack.enter_context(shape_folder(shape)))
        config = preflight(engine_config(model or "", settings))
        yield Target(
            shape or config.served_model_name, config, ModelConfig.from_folder(config.model)
        )


def llm_arguments(config: EngineConfig, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of `LLM` for this config with some settings changed."""
    return msgspec.structs.asdict(msgspec.structs.replace(config, **changes))
