"""The device of a rank, its number format, and the process group."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.group import TPGroup

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(config: EngineConfig, local_rank: int) -> torch.device:
    """`cuda:<local_rank>` or `cpu`. Raises ConfigError when the GPU asked for is not there."""
    count = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cpu" or (config.device == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"Local rank {local_rank} needs a GPU of its own and {count} are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
            "Start fewer ranks or make more GPUs visible."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU, the checkpoint's own format on a GPU."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(model.dtype, torch.bfloat16)


def join_group(
    device: torch.device, rank: int, world_size: int, generation: int, timeout_s: float
) -> TPGroup:
    """The process group of this generation of workers, met under its own store prefix.

    The store is torchrun's (MASTER_ADDR, MASTER_PORT); with one rank no group is made."""
    if world_size == 1:
        return TPGroup.single()
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not agent_store and rank == 0,
        timeout=timeout,
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = dist.PrefixStore(f"tp_runtime/{restart}/{generation}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=prefix,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return TPGroup.from_process_group("nccl" if backend == "nccl" else "gloo", device)
