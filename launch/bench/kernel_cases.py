"""The operators of a decode step as `bench kernels` times them: rank 0's share of a model, random
data, and beside each what it replaces.

A case makes calls on fresh data. `num_bytes` is what has to be read and written once: weights,
activations, the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.activation import SiluAndMul, silu_and_mul_reference
from tp_runtime.ops.attention.metadata import AttentionMetadata, DecodeMetadata, LayerKV
from tp_runtime.ops.attention.registry import BACKENDS
from tp_runtime.ops.group import SingleCommunicator, TPGroup
from tp_runtime.ops.kv_store import store_kv_reference
from tp_runtime.ops.linear import (
    MergedColumnParallelLinear,
    PackedColumnLinear,
    QKVParallelLinear,
)
from tp_runtime.ops.norm import RMSNorm, add_rms_norm_reference, rms_norm_reference
from tp_runtime.ops.normed_linear import normed_gate_up, normed_linear
from tp_runtime.ops.product import product
from tp_runtime.ops.rotary import RopeParameters, RotaryEmbedding, rotate_reference
from tp_runtime.ops.rotate_and_store import rotate_and_store
from tp_runtime.ops.sampling.best import best_of_shard, best_reference
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass, sample
from tp_runtime.ops.sharding import tile_shard, vocab_shard

Call = Callable[[], object]
_BLOCK_SIZE = 256


class Case(NamedTuple):
    """`make()` gives, for fresh data, our call and the one it stands for (None: there is none)."""

    name: str
    num_bytes: int
    make: Callable[[], tuple[Call, Call | None]]


class Cases:
    """Of rank 0 of `ranks`. Numbers of rows are those of a decode step."""

    def __init__(
        self, model: ModelConfig, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._group = TPGroup(0, ranks, SingleCommunicator())
        self._dtype = dtype
        self._device = device
        self._size = dtype.itemsize
        self._heads = self._qkv().heads

    def of(self, rows: int, context: int) -> Iterator[Case]:
        """Everything that is timed at `rows` rows whose sequences have `context` tokens."""
        yield self._norm(rows)
        yield from self._products(rows)
        yield self._activation(rows)
        yield self._rotation(rows)
        yield from self._attention(rows, context)
        yield from self._sampling(rows)

    # ------------------------------------------------------------ data

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self._dtype, device=self._device)

    def _qkv(self) -> QKVParallelLinear:
        m = self._model
        return QKVParallelLinear(
            *(m.hidden_size, m.head_dim, m.num_heads, m.num_kv_heads),
            group=self._group,
            dtype=self._dtype,
            device=self._device,
        )

    def _rms_norm(self, size: int) -> RMSNorm:
        norm = RMSNorm(size, self._model.rms_norm_eps, dtype=self._dtype, device=self._device)
        torch.nn.init.normal_(norm.weight)
        return norm

    # ------------------------------------------------------------ cases

    def _norm(self, rows: int) -> Case:
        size = self._model.hidden_size

        def make() -> tuple[Call, Call]:
            x, residual = self._random(rows, size), self._random(rows, size)
            norm = self._rms_norm(size)
            return (
                lambda: norm(x, residual),
                lambda: add_rms_norm_reference(x, residual, norm.weight, norm.eps),
            )

        return Case("add, norm", (4 * rows + 1) * size * self._size, make)

    def _products(self, rows: int) -> Iterator[Case]:
        m, one = self._model, self._group
        inter = tile_shard(m.intermediate_size, 0, one.size).size
        attended = self._heads.q.size * m.head_dim

        def gate_up() -> MergedColumnParallelLinear:
            return MergedColumnParallelLinear(
                m.hidden_size,
                [m.intermediate_size] * 2,
                group=one,
                dtype=self._dtype,
                device=self._device,
            )

        yield self._normed("norm, qkv", rows, self._qkv, silu=False)
        yield self._plain("output", rows, attended, m.hidden_size)
        yield self._normed("norm, gate_up, SiLU * mul", rows, gate_up, silu=True)
        yield self._plain("down", rows, inter, m.hidden_size)
        yield self._plain(
            "LM head", rows, m.hidden_size, vocab_shard(m.vocab_size, 0, one.size).size
        )

    def _normed(
        self, name: str, rows: int, build: Callable[[], PackedColumnLinear], silu: bool
    ) -> Case:
        hidden, act = self._model.hidden_size, SiluAndMul()
        outputs = build().weight.shape[0]
        moved = outputs * hidden + rows * (4 * hidden + outputs // (2 if silu else 1))

        def make() -> tuple[Call, Call]:
            linear, norm = build(), self._rms_norm(hidden)
            torch.nn.init.normal_(linear.weight, std=0.02)
            x, residual = self._random(rows, hidden), self._random(rows, hidden)

            def plain() -> Tensor:
                y = add_rms_norm_reference(x, residual, norm.weight, norm.eps)[0]
                y = torch.nn.functional.linear(y, linear.weight)
                return silu_and_mul_reference(y) if silu else y

            if silu:
                return lambda: normed_gate_up(x, residual, norm, linear, act), plain
            return lambda: normed_linear(x, residual, norm, linear), plain

        return Case(name, moved * self._size, make)

    def _plain(self, name: str, rows: int, inputs: int, outputs: int) -> Case:
        def make() -> tuple[Call, Call]:
            x, weight = self._random(rows, inputs), self._random(outputs, inputs)
            return (
                lambda: product(x, weight),
                lambda: torch.nn.functional.linear(x, weight),
            )

        moved = outputs * inputs + rows * (inputs + outputs)
        return Case(name, moved * self._size, make)

    def _activation(self, rows: int) -> Case:
        inter, act = (
            tile_shard(self._model.intermediate_size, 0, self._group.size).size,
            SiluAndMul(),
        )

        def make() -> tuple[Call, Call]:
            x = self._random(rows, 2 * inter)
            return lambda: act(x), lambda: silu_and_mul_reference(x)

        return Case("SiLU * mul", 3 * rows * inter * self._size, make)

    def _rotation(self, rows: int) -> Case:
        m, heads = self._model, self._heads
        q_heads, kv_heads, dim = heads.q.size, heads.kv.size, m.head_dim
        rope = RopeParameters("default", 1e6, dim, 4096)
        rotary = RotaryEmbedding(dim, rope, 4096, device=self._device)
        slots = torch.arange(rows, device=self._device)

        def make() -> tuple[Call, Call]:
            q, k, v = (self._random(rows, n, dim) for n in (q_heads, kv_heads, kv_heads))
            blocks = -(-rows // _BLOCK_SIZE)
            kv = LayerKV(
                *(self._random(blocks, _BLOCK_SIZE, kv_heads, dim) for _ in range(2)),
            )
            q_norm, k_norm = (
                (self._rms_norm(dim), self._rms_norm(dim)) if m.qk_norm else (None, None)
            )
            meta = AttentionMetadata(slots)

            def plain() -> None:
                a, b = q, k
                if q_norm is not None and k_norm is not None:
                    a = rms_norm_reference(q, q_norm.weight, q_norm.eps)
                    b = rms_norm_reference(k, k_norm.weight, k_norm.eps)
                cos, sin = rotary.cos_sin[slots].chunk(2, dim=-1)
                rotate_reference(a, cos, sin)
                store_kv_reference(rotate_reference(b, cos, sin), v, kv.k, kv.v, slots)

            return (
                lambda: rotate_and_store(q, k, v, slots, rotary, kv, meta, q_norm, k_norm),
                plain,
            )

        moved = rows * dim * (2 * q_heads + 4 * kv_heads)
        return Case("q/k norm, rotate, store", moved * self._size, make)

    def _attention(self, rows: int, context: int) -> Iterator[Case]:
        """Every back-end that works here, each beside nothing: they are each other's peers."""
        dim = self._model.head_dim
        kv_heads = self._heads.kv.size
        blocks = -(-context // _BLOCK_SIZE)
        moved = 2 * rows * context * kv_heads * dim
        for name, cls in BACKENDS.items():
            if cls.supports(dim, self._dtype, _BLOCK_SIZE, None, self._device) is not None:
                continue
            try:
                backend = cls()
            except (ImportError, OSError):
                continue

            def make(backend=backend) -> tuple[Call, None]:  # type: ignore[no-untyped-def]
                q = self._random(rows, self._heads.q.size, dim)
                shape = (rows * blocks, _BLOCK_SIZE, kv_heads, dim)
                k, v = self._random(*shape), self._random(*shape)
                table = torch.arange(rows * blocks, dtype=torch.int32, device=self._device)
                lengths = torch.full((rows,), context, dtype=torch.int32, device=self._device)
                meta = DecodeMetadata(lengths, table.view(rows, blocks))
                backend.prepare_decode(meta, LayerKV(k, v), [None])  # once a step, not counted
                return lambda: backend.decode(q, k, v, meta, dim**-0.5, None), None

            yield Case(f"attention, {name}", moved * self._size, make)

    def _sampling(self, rows: int) -> Iterator[Case]:
        """Of this rank's columns: what the exchange between ranks starts from; and the full sampler
        over whole rows."""
        columns = vocab_shard(self._model.vocab_size, 0, self._group.size).size

        def batch(kind: SamplingClass) -> SamplingBatch:
            def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.full((rows,), value, dtype=dtype, device=self._device)

            number = torch.arange(rows, device=self._device)
            zero = full(0, torch.int64)
            temperature = full(0.0 if kind == SamplingClass.GREEDY else 0.8)
            parts = (number, number, zero, full(0.95), full(0.0), zero)
            return SamplingBatch(kind, temperature, *parts)

        def best(kind: SamplingClass) -> tuple[Call, Call]:
            logits, params = self._random(rows, columns).float(), batch(kind)
            return (
                lambda: best_of_shard(logits, 0, params),
                lambda: best_reference(logits, 0, params),
            )

        def whole() -> tuple[Call, None]:
            logits = self._random(rows, self._model.vocab_size).float()
            params = batch(SamplingClass.FULL)
            return lambda: sample(logits, params), None

        yield Case("best id, greedy", 4 * rows * columns, lambda: best(SamplingClass.GREEDY))
        yield Case("best id, temperature", 4 * rows * columns, lambda: best(SamplingClass.GUMBEL))
        yield Case("top-p over whole rows", 4 * rows * self._model.vocab_size, whole)
