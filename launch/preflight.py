"""What can be checked before any process starts: GPUs, the model's config, its files' headers.

Takes well under two seconds and loads neither torch nor CUDA. What it returns is what every process
of the server sees: a folder instead of a hub name, a device instead of "auto".
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from tp_runtime.checkpoint_files import find_checkpoint, read_header
from tp_runtime.engine_config import DeviceName, EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch.gpus import Gpus
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_folder import resolve_model_folder
from tp_runtime.model_length import resolve_max_model_len


def preflight(config: EngineConfig, local_ranks: int = 0) -> EngineConfig:
    """The config with model folder and device resolved. `local_ranks`: ranks of this host, which
    need a GPU each; 0: all are.

    May download the model. Raises ConfigError, one sentence, when this could not work."""
    config.validate()
    device = _device(config, local_ranks or config.tensor_parallel_size)
    folder = resolve_model_folder(config.model)
    model = ModelConfig.from_folder(folder)
    resolve_max_model_len(config, model)
    if config.load_format != "dummy":
        for file in find_checkpoint(folder).files:
            read_header(file)
    if config.tensor_parallel_size > model.num_heads:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} is more than the "
            f"{model.num_heads} query heads of {config.model}; use at most {model.num_heads}."
        )
    if config.compile and device == "cpu" and not _cpp_compiler():
        raise ConfigError(
            "--compile needs a C++ compiler on a CPU and none was found; install g++ (or name one "
            "in CXX), or leave --compile out."
        )
    name = config.served_model_name or _name_of(config.model, folder)
    return msgspec.structs.replace(
        config,
        model=str(folder),
        served_model_name=name,
        device=device,
        trace=_trace_file(config.trace),
    )


def _cpp_compiler() -> str | None:
    """The one that torch.compile would take."""
    return next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None
    )


def _trace_file(trace: str) -> str:
    if not trace:
        return ""
    path = Path(trace).absolute()
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--trace {trace}: {path.parent} is no folder that can be written to.")
    return str(path)


def _name_of(model: str, folder: Path) -> str:
    return folder.name if os.path.isdir(model) else model


def _device(config: EngineConfig, local_ranks: int) -> DeviceName:
    if config.device == "cpu":
        return "cpu"
    gpus = Gpus.seen()
    if config.device == "auto" and not gpus.visible:
        return "cpu"  # there is none, or CUDA_VISIBLE_DEVICES hides them all on purpose
    gpus.require(local_ranks)
    return "cuda"
