"""The fastest pair on Hopper: FlashAttention-3 prefills, this project's own kernel decodes.

FlashAttention-3 decodes in 12 us at the least, however short the contexts; `paged_decode` is made
for one new token per sequence and for pages of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.flash3 import FlashAttention3Backend
from tp_runtime.ops.attention.metadata import DecodeMetadata, LayerKV, PrefillMetadata
from tp_runtime.ops.attention.triton_backend import TritonBackend


class HopperBackend(AttentionBackend):
    """What both can do: Hopper GPUs, bfloat16 and float16, any block size."""

    name = "flash-attn-3+triton"
    graph_safe = True

    def __init__(self) -> None:
        self._flash = FlashAttention3Backend()
        self._triton = TritonBackend()

    @classmethod
    def supports(
        cls,
        head_size: int,
        dtype: torch.dtype,
        block_size: int | None,
        window: int | None,
        device: torch.device,
    ) -> str | None:
        asked = (head_size, dtype, block_size, window, device)
        return FlashAttention3Backend.supports(*asked) or TritonBackend.supports(*asked)

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
        return self._flash.prefill(q, k, v, k_cache, v_cache, meta, scale, window)

    def prepare_decode(
        self, meta: DecodeMetadata, kv: LayerKV, windows: Iterable[int | None]
    ) -> None:
        self._triton.prepare_decode(meta, kv, windows)

    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: DecodeMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return self._triton.decode(q, k_cache, v_cache, meta, scale, window)
