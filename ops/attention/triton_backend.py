"""Attention by this project's own Triton kernels: any block size, sliding windows, float32.

The back-end where no FlashAttention is installed, or where it does not do what is asked.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend, cuda_reason
from tp_runtime.ops.attention.metadata import DecodeMetadata, LayerKV, PrefillMetadata

if TYPE_CHECKING:
    from tp_runtime.ops.kernels.decode_plan import DecodeConfig

_MAX_HEAD = 256
"""Wider heads would need more shared memory and registers than a program has."""

_COUNTERS = 16_384
"""More than rows times KV heads of any usual batch, in 64 KB."""


class TritonBackend(AttentionBackend):
    """CUDA, compute capability 8.0 or newer."""

    name = "triton"
    graph_safe = True

    def __init__(self) -> None:
        from tp_runtime.ops.kernels import decode_plan, paged_decode, paged_prefill  # needs triton

        self._plan = decode_plan
        self._decode = paged_decode
        self._prefill = paged_prefill
        self._counters: list[Tensor] = []

    @classmethod
    def supports(
        cls,
        head_size: int,
        dtype: torch.dtype,
        block_size: int | None,
        window: int | None,
        device: torch.device,
    ) -> str | None:
        if head_size > _MAX_HEAD:
            return f"heads of {head_size} are larger than {_MAX_HEAD}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} is none of float32, bfloat16, float16"
        if reason := cuda_reason(device, (8, 0)):
            return reason
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        return None

    @classmethod
    def default_block_size(cls) -> int:
        return 16

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: PrefillMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        cached = meta.block_tables is not None
        return self._prefill.paged_prefill(
            q,
            k_cache if cached else k,
            v_cache if cached else v,
            meta.cu_seqlens_q,
            meta.context_lens,
            meta.block_tables,
            meta.max_seqlen_q,
            scale,
            window,
        )

    def prepare_decode(
        self, meta: DecodeMetadata, kv: LayerKV, windows: Iterable[int | None]
    ) -> None:
        config = self._config(kv.k)
        for window in set(windows):
            meta.plans[window] = self._plan.plan_decode(
                meta.context_lens, kv.k.shape[2], window, config
            )

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: DecodeMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return self._decode.paged_decode(
            q,
            k_cache,
            v_cache,
            meta.context_lens,
            meta.block_tables,
            scale,
            window,
            self._config(k_cache),
            self._zeroed_counters(q.shape[0] * k_cache.shape[2], q.device),
            meta.plans.get(window),
        )

    def _config(self, cache: Tensor) -> DecodeConfig:
        return self._decode.default_config(cache.shape[3], cache.dtype, _processors(cache.device))

    def _zeroed_counters(self, number: int, device: torch.device) -> Tensor:
        """What the shares of a step are counted in; every step leaves it zero. Made at the first
        step, before any is recorded. Replaced ones are kept: recorded steps still write there."""
        last = self._counters[-1] if self._counters else None
        if last is None or last.numel() < number or last.device != device:
            last = torch.zeros(max(number, _COUNTERS), dtype=torch.int32, device=device)
            self._counters.append(last)
        return last


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
