"""Two or more GPUs of one host: sums over symmetric memory beside those of NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.nccl_ranks import run_on_gpus
from tests.gpu.test_tp2 import GREEDY, MIXED, generate
from tests.tiny_models import make_tiny
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.linear import RowParallelLinear
from tp_runtime.ops.norm import add_rms_norm_reference, rms_norm_reference
from tp_runtime.ops.product import product
from tp_runtime.ops.sum_way import ChooseWay, SumWay, choose_way, one_shot_only, two_shot_only
from tp_runtime.ops.symmetric import SymmetricCommunicator, with_symmetric_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

HIDDEN = 1024
EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]


def fast(
    group: TPGroup, hidden: int, dtype: torch.dtype, choose: ChooseWay = choose_way
) -> TPGroup:
    better, reason = with_symmetric_memory(
        group, hidden, dtype, torch.device("cuda", torch.cuda.current_device()), choose
    )
    assert not reason, reason
    return better


def ways(better: TPGroup) -> list[SumWay]:
    assert isinstance(better.comm, SymmetricCommunicator)
    return better.comm.ways


def term(group: TPGroup, rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    torch.manual_seed(1000 * seed + group.rank)
    return torch.randn(rows, HIDDEN, device="cuda").to(dtype)


def sums(
    group: TPGroup, dtype: torch.dtype, choose: ChooseWay = choose_way
) -> list[tuple[Tensor, Tensor]]:
    """(over symmetric memory, over NCCL) for several numbers of rows, again and again, with a rank
    that lags now and then."""
    better = fast(group, HIDDEN, dtype, choose)
    assert SumWay.TWO_SHOT in ways(better) or choose is not two_shot_only
    found = []
    for turn, rows in enumerate((1, 256, 3, 1, 1, 64, 257, 2, 512, 256, 1)):
        x = term(group, rows, dtype, turn)
        if turn % 3 == group.rank:
            torch.cuda._sleep(20_000_000)
        found.append((better.comm.all_reduce(x.clone()).cpu(), group.comm.all_reduce(x).cpu()))
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs more than two GPUs")
@pytest.mark.parametrize("choose", [choose_way, one_shot_only, two_shot_only])
def test_sums_are_the_same_bits_on_all_gpus_there_are(choose: ChooseWay) -> None:
    ranks = run_on_gpus(torch.cuda.device_count(), sums, torch.bfloat16, choose)
    for found in ranks[1:]:
        for ours, first in zip(found, ranks[0], strict=True):
            assert torch.equal(ours[0], first[0])
            torch.testing.assert_close(ours[0], ours[1], rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("choose", [choose_way, two_shot_only])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_the_same_bits_on_every_rank_and_those_of_nccl(
    dtype: torch.dtype, choose: ChooseWay
) -> None:
    ranks = run_on_gpus(2, sums, dtype, choose)
    for first, second in zip(*ranks, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[0], first[1])


def recorded(
    group: TPGroup, dtype: torch.dtype, rows: int, choose: ChooseWay = choose_way
) -> list[Tensor]:
    """A graph of twelve fused sums, each of the one before, replayed; and the separate layers."""
    better = fast(group, HIDDEN, dtype, choose)
    norm = torch.linspace(0.5, 1.5, HIDDEN, device="cuda").to(dtype)
    x = term(group, rows, dtype, 1)
    residual = torch.ones_like(x)

    def chain(one_kernel: bool) -> Tensor:
        h, r = x, None
        for number in range(12):
            if one_kernel:
                h, r = better.comm.all_reduce_norm(h, r, norm, EPS)
            else:
                total = group.comm.all_reduce(h.clone())
                h, r = (
                    (rms_norm_reference(total, norm, EPS), total)
                    if r is None
                    else add_rms_norm_reference(total, r, norm, EPS)
                )
            h = h * (1 + 0.01 * number * group.rank) + residual
        return h

    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    results = []
    for replay in range(3):
        x.copy_(term(group, rows, dtype, 10 + replay))
        graph.replay()
        results += [out.cpu(), chain(False).cpu()]
    graph.reset()
    return results


@pytest.mark.parametrize("rows", [8, 300])
@pytest.mark.parametrize("choose", [choose_way, two_shot_only])
def test_sum_residual_and_norm_in_one_kernel_equal_the_separate_ones(
    rows: int, choose: ChooseWay
) -> None:
    dtype = torch.bfloat16
    for results in run_on_gpus(2, recorded, dtype, rows, choose):
        for ours, separate in zip(results[::2], results[1::2], strict=True):
            step = 2**-5
            torch.testing.assert_close(ours.float(), separate.float(), rtol=step, atol=step)


def fused(group: TPGroup, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Sum, add and norm of different numbers of rows, in two steps and in one."""
    two, one = (fast(group, HIDDEN, dtype, choose) for choose in (two_shot_only, one_shot_only))
    norm = torch.linspace(0.5, 1.5, HIDDEN, device="cuda").to(dtype)
    found = []
    for turn, rows in enumerate((1, 5, 300, 301)):
        x = term(group, rows, dtype, turn)
        residual = torch.linspace(-1, 1, x.numel(), device="cuda").view(x.shape).to(dtype)
        both = (better.comm.all_reduce_norm(x, residual, norm, EPS) for better in (two, one))
        for ours, other in zip(*both, strict=True):
            found.append((ours.cpu(), other.cpu()))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_steps_give_the_sum_of_one_step_to_the_bit(dtype: torch.dtype) -> None:
    """The norm's mean of squares may be added in another order by another number of threads."""
    ranks = run_on_gpus(2, fused, dtype)
    for first, second in zip(*ranks, strict=True):
        assert torch.equal(first[0], second[0])
    for normed, summed in zip(ranks[0][::2], ranks[0][1::2], strict=True):
        assert torch.equal(*summed)
        step = 2**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(*normed, rtol=step, atol=1e-6)


def in_parts(group: TPGroup) -> tuple[Tensor, Tensor]:
    """A prefill of 6,000 tokens through a row-parallel layer: as it is, and summed in one piece."""
    place = {"dtype": torch.bfloat16, "device": "cuda"}
    layer = RowParallelLinear(512, HIDDEN, group=group, sum_later=True, **place)
    torch.manual_seed(1 + group.rank)
    layer.weight.data.normal_()
    x = torch.randn(6000, layer.input_shard.size, **place)
    parts = layer(x)
    assert isinstance(parts, Tensor)  # summed already
    return parts.cpu(), group.comm.all_reduce(product(x, layer.weight)).cpu()


def test_sums_of_a_long_prefill_are_made_in_parts() -> None:
    for parts, whole in run_on_gpus(2, in_parts):
        torch.testing.assert_close(parts, whole, rtol=2**-6, atol=0.5)


def gathered(group: TPGroup) -> list[list[Tensor]]:
    better = fast(group, HIDDEN, torch.bfloat16)
    found = []
    for rows in (1, 256, 7, 1024, 2000):
        x = torch.arange(rows, device="cuda") + (group.rank << 40)
        found.append([part.cpu() for part in better.comm.all_gather(x)])
    return found


def test_gathering_gives_every_rank_everything() -> None:
    for results in run_on_gpus(2, gathered):
        for parts in results:
            rows = torch.arange(parts[0].shape[0])
            assert all(torch.equal(part, rows + (r << 40)) for r, part in enumerate(parts))


def tokens(group: TPGroup, folder: Path, hidden: int) -> list[list[list[int]]]:
    better = fast(group, hidden, torch.float32)
    assert isinstance(better.comm, SymmetricCommunicator)
    return [
        generate(better, folder, params, "sharded", torch.float32)
        for params in ([GREEDY] * 4, MIXED)
    ]


def test_float32_tokens_equal_those_of_one_gpu(tmp_path: Path) -> None:
    folder = make_tiny(
        "qwen3",
        tmp_path / "model",
        head_dim=64,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=250,
    )
    alone = [
        generate(TPGroup.single(), folder, params, "gather", torch.float32)
        for params in ([GREEDY] * 4, MIXED)
    ]
    for found in run_on_gpus(2, tokens, folder, 64):
        assert found == alone
