"""Batches for attention tests, and what attention is, written out in float64.

The cache is full of NaN except for the slots that hold tokens, blocks are dealt in random order,
and block-table entries past a sequence's blocks point anywhere, also outside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import DecodeMetadata, PrefillMetadata

GARBAGE = 2_000_000_000


@dataclass
class Case:
    """Sequences of `contexts` tokens, of which the last `new` are queries."""

    contexts: list[int]
    new: list[int]
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    scale: float

    @classmethod
    def make(
        cls,
        contexts: list[int],
        new: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Case:
        generator = torch.Generator().manual_seed(sum(contexts) + head_dim)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        needed = [-(-context // block_size) for context in contexts]
        order = torch.randperm(sum(needed) + 2, generator=generator)
        shape = (len(order), block_size, heads[1], head_dim)
        k_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        v_cache = k_cache.clone()
        tables = torch.full((len(contexts), max(needed) + 2), GARBAGE, dtype=torch.int32)
        keys = [draw(context, heads[1], head_dim) for context in contexts]
        values = [draw(context, heads[1], head_dim) for context in contexts]
        for row, blocks in enumerate(order[: sum(needed)].split(needed)):
            tables[row, : len(blocks)] = blocks
            position = torch.arange(contexts[row])
            slots = (blocks[position // block_size] * block_size + position % block_size).to(device)
            k_cache.flatten(0, 1)[slots] = keys[row]
            v_cache.flatten(0, 1)[slots] = values[row]
        return cls(
            contexts, new, draw(sum(new), heads[0], head_dim), keys, values, k_cache, v_cache,
            tables.to(device), head_dim**-0.5,
        )  # fmt: skip

    def prefill_metadata(self, *, cached: bool) -> PrefillMetadata:
        starts = torch.tensor([0, *self.new]).cumsum(0).to(self.q.device, torch.int32)
        return PrefillMetadata(
            starts,
            torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device),
            self.block_tables if cached else None,
            max(self.new),
            max(self.contexts),
        )

    def decode_metadata(self) -> DecodeMetadata:
        return DecodeMetadata(
            torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device),
            self.block_tables,
        )

    def new_keys(self) -> tuple[Tensor, Tensor]:
        pairs = zip(self.keys, self.values, self.new, strict=True)
        parts = [(k[len(k) - new :], v[len(v) - new :]) for k, v, new in pairs]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    def run_prefill(
        self, backend: AttentionBackend, *, cached: bool, window: int | None = None
    ) -> Tensor:
        meta = self.prefill_metadata(cached=cached)
        k, v = self.new_keys()
        return backend.prefill(self.q, k, v, self.k_cache, self.v_cache, meta, self.scale, window)

    def run_decode(
        self,
        backend: AttentionBackend,
        *,
        window: int | None = None,
    ) -> Tensor:
        meta = self.decode_metadata()
        return backend.decode(self.q, self.k_cache, self.v_cache, meta, self.scale, window)

    def expected(self, window: int | None = None) -> Tensor:
        """[sum(new), heads, head_dim] float64 on the CPU; zero for sequences without context."""
        parts: list[Tensor] = []
        queries = self.q.double().cpu().split(self.new)
        for q, keys, values in zip(queries, self.keys, self.values, strict=True):
            if not len(keys):
                parts.append(torch.zeros_like(q))
                continue
            group = q.shape[1] // keys.shape[1]
            k = keys.double().cpu().repeat_interleave(group, 1)
            v = values.double().cpu().repeat_interleave(group, 1)
            at = torch.arange(len(k) - len(q), len(k))[:, None]
            distance = at - torch.arange(len(k))[None, :]
            seen = (distance >= 0) & (distance < (window or len(k)))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)

    def check(self, out: Tensor, window: int | None = None) -> None:
        """`out` is finite and equals `expected` as far as its dtype can."""
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[out.dtype]
        want = self.expected(window)
        assert out.isfinite().all()
        assert (out.double().cpu() - want).abs().max() <= tolerance * want.abs().max()
