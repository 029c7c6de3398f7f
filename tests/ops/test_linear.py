"""Parallel linears against the unsharded layer, in float32, with real gloo processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gloo_pool import GlooPool
from tp_runtime.ops.group import Communicator, TPGroup
from tp_runtime.ops.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from tp_runtime.ops.partial import Partial
from tp_runtime.ops.sharding import Shard, kv_head_shard

Pools = Callable[[int], GlooPool]
MAKE = {"dtype": torch.float32, "device": "cpu"}
HIDDEN, TOKENS = 24, 5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class CountingSource:
    """A tensor of a checkpoint that remembers which elements were read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.read = torch.zeros(tensor.shape, dtype=torch.int64)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        self.read[index] += 1
        return self.tensor[index]


def _close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def _column(group: TPGroup, outputs: int, bias: bool) -> tuple[Tensor, Tensor]:
    layer = ColumnParallelLinear(HIDDEN, outputs, bias=bias, group=group, **MAKE)
    source = CountingSource(drawn(outputs, HIDDEN, seed=1))
    assert layer.load_weight("weight", source) == layer.weight.numel()
    if bias:
        layer.load_weight("bias", drawn(outputs, seed=2))
    return layer(drawn(TOKENS, HIDDEN, seed=0)), source.read


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "bias"), [(70, True), (300, False), (3, True)])
def test_column_parallel_outputs_join_to_the_whole_layer(
    gloo_pool: Pools, size: int, outputs: int, bias: bool
) -> None:
    results = gloo_pool(size).run(_column, outputs, bias)
    whole = F.linear(
        drawn(TOKENS, HIDDEN, seed=0),
        drawn(outputs, HIDDEN, seed=1),
        drawn(outputs, seed=2) if bias else None,
    )
    _close(torch.cat([out for out, _ in results], dim=-1), whole)
    assert (sum(read for _, read in results) == 1).all()


def _row(group: TPGroup, inputs: int, bias: bool) -> tuple[Tensor, Tensor]:
    layer = RowParallelLinear(inputs, HIDDEN, bias=bias, group=group, **MAKE)
    source = CountingSource(drawn(HIDDEN, inputs, seed=1))
    assert layer.load_weight("weight", source) == layer.weight.numel()
    if bias:
        assert layer.load_weight("bias", drawn(HIDDEN, seed=2)) == HIDDEN
    x = drawn(TOKENS, inputs, seed=0)
    return layer(x[:, layer.input_shard.start : layer.input_shard.stop]), source.read


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("inputs", "bias"), [(70, True), (300, False), (3, True)])
def test_row_parallel_sums_the_shards_and_adds_the_bias_once(
    gloo_pool: Pools, size: int, inputs: int, bias: bool
) -> None:
    results = gloo_pool(size).run(_row, inputs, bias)
    whole = F.linear(
        drawn(TOKENS, inputs, seed=0),
        drawn(HIDDEN, inputs, seed=1),
        drawn(HIDDEN, seed=2) if bias else None,
    )
    for out, _ in results:
        _close(out, whole)
        assert torch.equal(out, results[0][0])
    assert (sum(read for _, read in results) == 1).all()


def _row_bias_bits(group: TPGroup) -> Tensor:
    """Products are sums of powers of two, exact in any order; only the bias can round."""
    layer = RowParallelLinear(
        4, 1, bias=True, group=group, tile=1, dtype=torch.bfloat16, device="cpu"
    )
    layer.load_weight("weight", torch.tensor([[1.0, 2.0, 4.0, 1.0]]))
    layer.load_weight("bias", torch.tensor([1.0 / 512]))
    x = torch.tensor([[1.0, 0.5, -0.5, 0.0]], dtype=torch.bfloat16)
    return layer(x[:, layer.input_shard.start : layer.input_shard.stop])


class InParts:
    """Cuts every sum over ranks in three, as a communicator on GPUs does with many rows."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.begun = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def sums_in_parts(self, rows: int) -> int:
        return 3

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        self.begun += 1
        return self._inner.begin_all_reduce(x)


def _row_in_parts(group: TPGroup, bias: bool) -> tuple[Tensor, Tensor, int]:
    """Of the same layer: in one piece, in parts, and how many sums that took."""
    comm = InParts(group.comm)
    results = []
    for of in (group, TPGroup(group.rank, group.size, comm)):
        layer = RowParallelLinear(70, HIDDEN, bias=bias, group=of, sum_later=True, **MAKE)
        layer.load_weight("weight", drawn(HIDDEN, 70, seed=1))
        if bias:
            layer.load_weight("bias", drawn(HIDDEN, seed=2))
        shard = layer.input_shard
        y = layer(drawn(7, 70, seed=0)[:, shard.start : shard.stop])
        results.append(y.total() if isinstance(y, Partial) else y)
    return results[0], results[1], comm.begun


@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_sums_in_parts_are_those_of_one_piece(gloo_pool: Pools, bias: bool) -> None:
    for whole, parts, begun in gloo_pool(2).run(_row_in_parts, bias):
        _close(parts, whole)
        assert begun == 3


def test_row_parallel_bias_rounds_alike_at_every_size(gloo_pool: Pools) -> None:
    """A bias inside one rank's product is swallowed there: 2 + 1/512 is 2 in bfloat16, and with
    the other rank's -2 the sum is then 0 where one GPU gives 1/512."""
    for size in (1, 2, 3, 4):
        for out in gloo_pool(size).run(_row_bias_bits):
            assert out.tolist() == [[1.0 / 512]]


HEADS = [(9, 3), (12, 6), (4, 2), (7, 1)]
HEAD_DIM = 6


def _attention_projections(
    group: TPGroup, num_heads: int, num_kv_heads: int
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """q, k, v of this rank, and the row-parallel product over its query heads."""
    qkv = QKVParallelLinear(
        HIDDEN, HEAD_DIM, num_heads, num_kv_heads, bias=True, group=group, **MAKE
    )
    sizes = {"q": num_heads * HEAD_DIM, "k": num_kv_heads * HEAD_DIM, "v": num_kv_heads * HEAD_DIM}
    sources = {}
    filled = 0
    for seed, (name, rows) in enumerate(sizes.items()):
        sources[name] = CountingSource(drawn(rows, HIDDEN, seed=10 + seed))
        filled += qkv.load_weight("weight", sources[name], name)
        filled += qkv.load_weight("bias", drawn(rows, seed=20 + seed), name)
    assert filled == sum(parameter.numel() for parameter in qkv.parameters())
    q, k, v = qkv.split(qkv(drawn(TOKENS, HIDDEN, seed=0)))
    out = RowParallelLinear(
        num_heads * HEAD_DIM,
        HIDDEN,
        group=group,
        input_shard=qkv.heads.q.scaled(HEAD_DIM),
        **MAKE,
    )
    out.load_weight("weight", drawn(HIDDEN, num_heads * HEAD_DIM, seed=30))
    reads = {name: source.read for name, source in sources.items()}
    return {"q": q, "k": k, "v": v}, out(q.flatten(1)), reads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_qkv_gives_each_rank_its_heads_and_repeats_kv_heads_alike(
    gloo_pool: Pools, size: int, num_heads: int, num_kv_heads: int
) -> None:
    results = gloo_pool(size).run(_attention_projections, num_heads, num_kv_heads)
    x = drawn(TOKENS, HIDDEN, seed=0)
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    whole = {
        name: F.linear(
            x,
            drawn(heads * HEAD_DIM, HIDDEN, seed=10 + seed),
            drawn(heads * HEAD_DIM, seed=20 + seed),
        ).unflatten(-1, (heads, HEAD_DIM))
        for seed, (name, heads) in enumerate(counts.items())
    }
    product = F.linear(whole["q"].flatten(1), drawn(HIDDEN, num_heads * HEAD_DIM, seed=30))
    for rank, (parts, out, _) in enumerate(results):
        shard = kv_head_shard(num_heads, num_kv_heads, rank, size)
        _close(parts["q"], whole["q"][:, shard.q.start : shard.q.stop])
        _close(parts["k"], whole["k"][:, shard.kv.start : shard.kv.stop])
        _close(parts["v"], whole["v"][:, shard.kv.start : shard.kv.stop])
        _close(out, product)
    assert (sum(reads["q"] for _, _, reads in results) == 1).all()
    assert (sum(reads["k"] for _, _, reads in results) >= 1).all()


def _swiglu(group: TPGroup, intermediate: int, bias: bool) -> Tensor:
    merged = MergedColumnParallelLinear(
        HIDDEN, [intermediate, intermediate], bias=bias, group=group, **MAKE
    )
    down = RowParallelLinear(intermediate, HIDDEN, bias=bias, group=group, **MAKE)
    for index in (1, 0):
        merged.load_weight("weight", drawn(intermediate, HIDDEN, seed=1 + index), index)
        if bias:
            merged.load_weight("bias", drawn(intermediate, seed=3 + index), index)
    down.load_weight("weight", drawn(HIDDEN, intermediate, seed=5))
    if bias:
        down.load_weight("bias", drawn(HIDDEN, seed=6))
    gate, up = merged(drawn(TOKENS, HIDDEN, seed=0)).chunk(2, dim=-1)
    return down(F.silu(gate) * up)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("intermediate", "bias"), [(520, True), (101, False), (2, True)])
def test_merged_gate_and_up_match_the_row_parallel_layer_behind_them(
    gloo_pool: Pools, size: int, intermediate: int, bias: bool
) -> None:
    x = drawn(TOKENS, HIDDEN, seed=0)
    gate, up = (
        F.linear(
            x,
            drawn(intermediate, HIDDEN, seed=1 + index),
            drawn(intermediate, seed=3 + index) if bias else None,
        )
        for index in (0, 1)
    )
    whole = F.linear(
        F.silu(gate) * up,
        drawn(HIDDEN, intermediate, seed=5),
        drawn(HIDDEN, seed=6) if bias else None,
    )
    for out in gloo_pool(size).run(_swiglu, intermediate, bias):
        _close(out, whole)


def test_loading_names_what_does_not_fit() -> None:
    group = TPGroup.single()
    qkv = QKVParallelLinear(8, 2, 4, 2, group=group, **MAKE)
    with pytest.raises(ValueError, match=r"weight of shard 'k' .* \[4, 8\] .* gives \[8, 8\]"):
        qkv.load_weight("weight", torch.zeros(8, 8), "k")
    with pytest.raises(ValueError, match="no parameter 'bias'"):
        qkv.load_weight("bias", torch.zeros(8), "q")
    with pytest.raises(ValueError, match=r"no shard id 'o'; known are 'q', 'k', 'v'"):
        qkv.load_weight("weight", torch.zeros(8, 8), "o")
    row = RowParallelLinear(8, 4, bias=True, group=group, **MAKE)
    with pytest.raises(ValueError, match=r"bias should have shape \[4\] .* gives \[8\]"):
        row.load_weight("bias", torch.zeros(8))
    with pytest.raises(ValueError, match=r"weight should have shape \[4, 8\] .* gives \[8, 4\]"):
        row.load_weight("weight", torch.zeros(8, 4))


def test_loading_converts_to_the_dtype_of_the_layer() -> None:
    layer = ColumnParallelLinear(3, 2, group=TPGroup.single(), dtype=torch.bfloat16, device="cpu")
    weight = drawn(2, 3, seed=1)
    layer.load_weight("weight", weight)
    assert torch.equal(layer.weight, weight.bfloat16())


def test_an_explicit_empty_output_range_is_kept() -> None:
    layer = ColumnParallelLinear(3, 8, group=TPGroup.single(), output_shard=Shard(8, 8), **MAKE)
    assert layer(torch.zeros(2, 3)).shape == (2, 0)
