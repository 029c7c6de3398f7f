"""How large the KV cache of this rank can be, and the cache itself.

Layout per layer: k and v, each [blocks, block_size, kv_heads of this rank, head_dim]. The number of
blocks is the minimum over the ranks, agreed by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.metadata import LayerKV
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sharding import kv_head_shard

GIB = 1 << 30
MIN_BLOCKS = 2
"""A sequence of one block and one to grow into; less cannot generate anything."""


@dataclass(frozen=True)
class KVGeometry:
    """Shape of one rank's cache."""

    num_layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, model: ModelConfig, group: TPGroup, block_size: int, dtype: torch.dtype
    ) -> KVGeometry:
        shard = kv_head_shard(model.num_heads, model.num_kv_heads, group.rank, group.size)
        return cls(model.num_layers, block_size, shard.kv.size, model.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, k and v."""
        per_layer = self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * per_layer

    def allocate(self, num_blocks: int, device: torch.device) -> list[LayerKV]:
        """Zeroed caches of `num_blocks` blocks, one per layer."""
        shape = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        return [
            LayerKV(
                torch.zeros(shape, dtype=self.dtype, device=device),
                torch.zeros(shape, dtype=self.dtype, device=device),
            )
            for _ in range(self.num_layers)
        ]


@dataclass(frozen=True)
class MemoryBefore:
    """Device memory before this worker allocated anything, bytes. What other programs hold is not
    in `free`, so it is never counted as ours."""

    free: int
    total: int

    @classmethod
    def measure(cls, device: torch.device) -> MemoryBefore:
        if device.type != "cuda":
            return cls(0, 0)
        free, total = torch.cuda.mem_get_info(device)
        return cls(free, total)


def max_blocks(
    config: EngineConfig,
    geometry: KVGeometry,
    device: torch.device,
    before: MemoryBefore,
    peak_extra: int,
    graphs: int,
    useful: int,
) -> int:
    """Blocks this rank has room for, at most `useful`.

    `peak_extra`: bytes a worst-case step needs beyond what is allocated now; `graphs`: what graphs
    take, out of what --gpu-memory-utilization leaves as far as that suffices. Raises ConfigError
    with the numbers when not even `MIN_BLOCKS` fit."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type != "cuda":
        room = int(config.cpu_kv_cache_gib * GIB)
        return max(MIN_BLOCKS, min(useful, room // geometry.block_bytes))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_now = torch.cuda.mem_get_info(device)[0]
    used_by_us = before.free - free_now
    room = int(before.free * config.gpu_memory_utilization) - used_by_us - peak_extra
    blocks = min(useful, min(room, free_now - peak_extra - graphs) // geometry.block_bytes)
    if blocks < MIN_BLOCKS:
        raise ConfigError(
            f"No room for a KV cache: {before.free / GIB:.2f} GiB of {before.total / GIB:.2f} GiB "
            f"were free at start, weights take {used_by_us / GIB:.2f} GiB, a worst-case step "
            f"{peak_extra / GIB:.2f} GiB, CUDA graphs up to {graphs / GIB:.2f} GiB, and "
            f"--gpu-memory-utilization is "
            f"{config.gpu_memory_utilization:g}. Raise it, lower --max-num-batched-tokens, or use "
            f"more GPUs (--tensor-parallel-size)."
        )
    return int(blocks)
