"""FlashAttention-2 (arXiv:2307.08691), by the package `flash_attn`.

Called as its documentation says; nothing here touches the GPU by itself.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend, cuda_reason, window_pair
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata

_MODULE = "flash_attn"
_PAGE = 256
"""Its paged kernels take blocks that are multiples of this."""


class FlashAttention2Backend(AttentionBackend):
    """GPUs of compute capability 8.0 or newer, bfloat16 and float16, blocks of 256 tokens."""

    name = "flash-attn-2"
    graph_safe = True

    def __init__(self) -> None:
        self._flash = importlib.import_module(_MODULE)

    @classmethod
    def supports(
        cls,
        head_size: int,
        dtype: torch.dtype,
        block_size: int | None,
        window: int | None,
        device: torch.device,
    ) -> str | None:
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 and float16, not {dtype}"
        if head_size % 8 or head_size > 256:
            return f"heads of {head_size} are not a multiple of 8 up to 256"
        if block_size is not None and block_size % _PAGE:
            return f"it takes KV blocks that are multiples of {_PAGE} tokens, not {block_size}"
        if reason := cuda_reason(device, (8, 0)):
            return reason
        if importlib.util.find_spec(_MODULE) is None:
            return f"the package {_MODULE} (FlashAttention-2) is not installed"
        return None

    @classmethod
    def default_block_size(cls) -> int:
        return _PAGE

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
        starts_k, longest_k = meta.cu_seqlens_q, meta.max_seqlen_q
        if meta.block_tables is not None:
            k, v = k_cache, v_cache
            starts_k = F.pad(meta.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
            longest_k = meta.max_seqlen_k
        return self._flash.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=meta.cu_seqlens_q,
            cu_seqlens_k=starts_k,
            max_seqlen_q=meta.max_seqlen_q,
            max_seqlen_k=longest_k,
            softmax_scale=scale,
            causal=True,
            window_size=window_pair(window),
            block_table=meta.block_tables,
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
        out = self._flash.flash_attn_with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=meta.context_lens,
            block_table=meta.block_tables,
            softmax_scale=scale,
            causal=True,
            window_size=window_pair(window),
        )
        return out.squeeze(1)
