"""The interface every attention back-end implements.

A back-end only reads the cache; storing is the layer's work. It must give finite output for
padding rows and must never let a value of an unset slot reach the output (0 * NaN is NaN: values
are masked, not only scores).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from tp_runtime.ops.attention.metadata import DecodeMetadata, LayerKV, PrefillMetadata


class AttentionBackend(ABC):
    """Causal, grouped-query attention; `window` is the number of tokens a token sees, itself
    included (None: all)."""

    name: str
    graph_safe: bool
    """Whether `decode`, and `prefill` from the cache, can be captured in a CUDA graph: they read no
    device value on the host, and take lengths of 0 for what is padding."""

    @classmethod
    @abstractmethod
    def supports(
        cls,
        head_size: int,
        dtype: torch.dtype,
        block_size: int | None,
        window: int | None,
        device: torch.device,
    ) -> str | None:
        """None when it can run this; otherwise the reason why not, a clause for an error or a log
        ("needs CUDA"). block_size None: the back-end's own default."""

    @classmethod
    @abstractmethod
    def default_block_size(cls) -> int:
        """Tokens per KV block when the user sets none."""

    @abstractmethod
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
        """q [T, H, D], k and v [T, KV, D] of the new tokens -> [T, H, D] in q's dtype.

        The new keys and values have been stored already; with meta.block_tables everything is read
        from the cache."""

    def prepare_decode(  # noqa: B027 (most back-ends have nothing to prepare)
        self, meta: DecodeMetadata, kv: LayerKV, windows: Iterable[int | None]
    ) -> None:
        """Works out once a step, before anything else of the model runs, what `decode` needs in
        every layer, and leaves it in meta.plans. `kv`: the cache of any layer; `windows`: of all
        layers. Nothing, unless a back-end says otherwise."""

    @abstractmethod
    def decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: DecodeMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """q [B, H, D], one token per sequence -> [B, H, D] in q's dtype; zero for padding rows."""


def cuda_reason(device: torch.device, capability: tuple[int, int]) -> str | None:
    """Why `device` is not a CUDA GPU of at least this compute capability; None when it is."""
    if device.type != "cuda":
        return f"it needs a CUDA GPU and the device is {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return (
            f"it needs compute capability {capability[0]}.{capability[1]} and the GPU has "
            f"{found[0]}.{found[1]}"
        )
    return None


def window_pair(window: int | None) -> tuple[int, int]:
    """FlashAttention's (tokens seen to the left, to the right), the token itself not counted."""
    return (-1, -1) if window is None else (window - 1, 0)
