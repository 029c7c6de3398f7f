"""Functions run on several GPUs, one process each, joined by NCCL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tp_runtime.ops.group import TPGroup


def _rank_main(rank: int, size: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size, device_id=device
    )
    group = TPGroup.from_process_group("nccl", device)
    torch.save(fn(group, *args), f"{folder}/result_{rank}")
    torch.cuda.synchronize()
    group.comm.close()


def run_on_gpus(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(group, *args)` on `size` GPUs; the results in rank order. A rank that fails raises."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (size, folder, fn, args), nprocs=size)
        return [torch.load(f"{folder}/result_{r}", weights_only=False) for r in range(size)]
