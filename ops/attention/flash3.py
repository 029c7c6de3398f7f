"""FlashAttention-3 (arXiv:2407.08608), by the package that offers `flash_attn_interface`.

Called as its documentation says; nothing here touches the GPU by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend, cuda_reason, window_pair
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata

_MODULE = "flash_attn_interface"


def _call_directly(module: ModuleType) -> None:
    """torch's wrapper around the operator serves torch.compile, and its first call imports
    torch._dynamo: 4 s of every start. The function inside is all that is needed here."""
    name = "_flash_attn_forward"
    direct = getattr(getattr(module, name, None), "_init_fn", None)
    if direct is not None:
        setattr(module, name, direct)


class FlashAttention3Backend(AttentionBackend):
    """Hopper GPUs (compute capability 9.0), bfloat16 and float16, any block size."""

    name = "flash-attn-3"
    graph_safe = True

    def __init__(self) -> None:
        self._flash = importlib.import_module(_MODULE)
        _call_directly(self._flash)

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
        if reason := cuda_reason(device, (9, 0)):
            return reason
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "it is made for Hopper GPUs"
        if importlib.util.find_spec(_MODULE) is None:
            return f"the module {_MODULE} (FlashAttention-3) is not installed"
        return None

    @classmethod
    def default_block_size(cls) -> int:
        # As fast as larger ones. Blocks below its tile are loaded token by token with the tail
        # zeroed; whole-tile loads of larger blocks would bring in stale values past a sequence.
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
        if meta.block_tables is None:
            out = self._flash.flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=meta.cu_seqlens_q,
                cu_seqlens_k=meta.cu_seqlens_q,
                max_seqlen_q=meta.max_seqlen_q,
                max_seqlen_k=meta.max_seqlen_q,
                softmax_scale=scale,
                causal=True,
                window_size=window_pair(window),
            )
        else:
            out = self._flash.flash_attn_with_kvcache(
                q,
                k_cache,
                v_cache,
                cache_seqlens=meta.context_lens,
                page_table=meta.block_tables,
                cu_seqlens_q=meta.cu_seqlens_q,
                max_seqlen_q=meta.max_seqlen_q,
                softmax_scale=scale,
                causal=True,
                window_size=window_pair(window),
                # 0 lets the package choose; by bounds it would take memory for the longest.
                num_splits=1 if meta.recorded else 0,
            )
        # Releases before 3.0.0b1 return the log-sum-exp as well.
        return out[0] if isinstance(out, tuple) else out

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
            page_table=meta.block_tables,
            softmax_scale=scale,
            causal=True,
            window_size=window_pair(window),
        )
        return out.squeeze(1)
