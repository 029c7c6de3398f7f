"""Paged decode in shares that the program finishing last joins: in the interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention.cases import Case
from tp_runtime.ops.kernels.decode_plan import DecodeConfig, plan_decode
from tp_runtime.ops.kernels.paged_decode import paged_decode

TILE = 16


def _case(contexts: list[int], device: torch.device, **shape: Any) -> Case:
    return Case.make(contexts, [1] * len(contexts), device=device, **shape)


def _config(programs: int = 3, least: int = 1, tile: int = TILE) -> DecodeConfig:
    return DecodeConfig(tile, 4, 3, programs, least)


def _decode(
    case: Case,
    config: DecodeConfig,
    window: int | None = None,
    counters: Tensor | None = None,
    contexts: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """Checks too that every counter is back at zero."""
    meta = case.decode_metadata()
    if counters is None:
        counters = torch.zeros(64, dtype=torch.int32, device=case.q.device)
    out = paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        meta.context_lens if contexts is None else contexts,
        meta.block_tables,
        case.scale,
        window,
        config,
        counters,
        plan,
    )
    assert not counters.any()
    return out


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("programs", "block_size"), [(1, 24), (3, 1), (6, 16)])
def test_any_number_of_shares(
    window: int | None, block_size: int, programs: int, device: torch.device
) -> None:
    """More shares than some rows have tokens, and padding rows that have none."""
    case = _case([1, 0, 17, 150], device, heads=(2, 1), block_size=block_size)
    out = _decode(case, _config(programs), window)
    case.check(out, window)
    assert not out[1].any()


@pytest.mark.parametrize("least", [1, 2])
def test_lengths_around_the_borders_of_tiles_and_shares(least: int, device: torch.device) -> None:
    """One tile, one share, as many tiles as shares, and one token to each side; very uneven."""
    borders = [TILE, 2 * TILE, 3 * TILE, 6 * TILE]
    contexts = [border + more for border in borders for more in (-1, 0, 1)]
    case = _case([*contexts, 1, 0, 300], device, heads=(2, 1))
    case.check(_decode(case, _config(3, least)))


@pytest.mark.parametrize("window", [TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE])
def test_windows_around_the_borders_of_tiles(window: int, device: torch.device) -> None:
    case = _case([TILE, TILE + 1, 4 * TILE - 1, 4 * TILE, 4 * TILE + 1], device, heads=(2, 1))
    case.check(_decode(case, _config(2), window), window)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2), (20, 1)])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_groups_and_head_sizes_that_are_no_powers_of_two(
    heads: tuple[int, int], head_dim: int, device: torch.device
) -> None:
    case = _case([33, 0, 150], device, heads=heads, head_dim=head_dim)
    case.check(_decode(case, _config(4)))


def test_more_shares_than_are_joined_at_a_time(device: torch.device) -> None:
    case = _case([700, 17 * TILE], device, heads=(2, 1), head_dim=16)
    case.check(_decode(case, _config(40)))


def test_pages_that_are_larger_than_tiles(device: torch.device) -> None:
    case = _case([100, 33], device, heads=(2, 1), block_size=64)
    case.check(_decode(case, _config()))


def test_a_cache_that_holds_each_head_of_a_page_in_one_piece(device: torch.device) -> None:
    case = _case([100, 33], device)
    want = _decode(case, _config())
    case.k_cache = case.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    case.v_cache = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(_decode(case, _config()), want)


def test_a_replay_with_other_lengths_needs_nothing_from_the_host(device: torch.device) -> None:
    """The same tensors and number of shares each time, as in a CUDA graph."""
    case = _case([150, 150, 150], device, heads=(2, 1))
    counters = torch.zeros(3, dtype=torch.int32, device=device)
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    for contexts in ([150, 0, 17], [16, 149, 0], [48, 49, 47], [150, 150, 150]):
        lengths.copy_(torch.tensor(contexts))
        out = _decode(case, _config(), counters=counters, contexts=lengths)
        shorter = Case(
            contexts,
            case.new,
            case.q,
            [keys[:n] for keys, n in zip(case.keys, contexts, strict=True)],
            [values[:n] for values, n in zip(case.values, contexts, strict=True)],
            case.k_cache,
            case.v_cache,
            case.block_tables,
            case.scale,
        )
        shorter.check(out)


def test_the_same_batch_gives_the_same_bits(device: torch.device) -> None:
    case = _case([150, 90], device)
    first = _decode(case, _config())
    for _ in range(3):
        assert torch.equal(_decode(case, _config()), first)


def test_a_row_is_right_whatever_runs_beside_it(device: torch.device) -> None:
    """How it is cut depends on the others: whole, or at other tiles."""
    for beside in (0, 1, 40, 150, 400):
        case = _case([150, beside], device)
        case.check(_decode(case, _config(6)))


def test_whole_sequences_for_each_program_are_right_too(device: torch.device) -> None:
    """Lengths so alike, and so few programs, that nothing is cut."""
    case = _case([60, 33, 0, 47, 64, 1, 50], device, heads=(4, 2))
    for programs in (2, 4, 6, 14):
        case.check(_decode(case, _config(programs)))


def test_a_plan_made_before_gives_the_same_bits(device: torch.device) -> None:
    case = _case([150, 0, 90, 33], device)
    meta = case.decode_metadata()
    plan = plan_decode(meta.context_lens, 2, None, _config(8))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(_decode(case, _config(8), plan=plan), _decode(case, _config(8)))


@pytest.mark.gpu
def test_a_plan_is_seen_by_decode_that_comes_early(device: torch.device) -> None:
    """Lengths, plan, another kernel, decode: in a graph, replayed with other lengths."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA GPU")
    case = _case([150, 150, 150], device, heads=(2, 1))
    meta, config = case.decode_metadata(), _config(8)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    given, lengths = torch.zeros_like(meta.context_lens), torch.zeros_like(meta.context_lens)
    out, between = torch.empty_like(case.q), torch.zeros(8, device=device)

    def step() -> None:
        lengths.copy_(given)
        plan = plan_decode(lengths, 1, None, config)
        between.add_(1)
        caches = (case.k_cache, case.v_cache, lengths, meta.block_tables)
        out.copy_(paged_decode(case.q, *caches, case.scale, None, config, counters, plan))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for contexts in ([150, 1, 17], [16, 149, 2], [48, 49, 47], [150, 150, 150]) * 20:
        given.copy_(torch.tensor(contexts))
        graph.replay()
        want = _decode(case, config, contexts=given.clone())
        assert torch.equal(out, want)


def test_queries_may_be_a_view_of_a_packed_projection(device: torch.device) -> None:
    case = _case([33, 150], device)
    want = _decode(case, _config())
    case.q = torch.cat((case.q, case.q), dim=1)[:, :4]
    assert torch.equal(_decode(case, _config()), want)


def test_an_empty_batch_gives_an_empty_output(device: torch.device) -> None:
    case = _case([3], device)
    case.q, case.block_tables = case.q[:0], case.block_tables[:0]
    assert _decode(case, _config()).shape == case.q.shape


def test_what_it_cannot_take_is_refused(device: torch.device) -> None:
    case = _case([3, 5], device)
    with pytest.raises(ValueError, match="a counter for each of 4 pairs"):
        _decode(case, _config(), counters=torch.zeros(3, dtype=torch.int32, device=device))
    case.v_cache = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="one shape and layout"):
        _decode(case, _config())
    case = _case([3, 5], device)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="last stride is 1"):
        _decode(case, _config())
    case = _case([3, 5], device, heads=(3, 1))
    case.k_cache = case.v_cache = case.k_cache.repeat(1, 1, 2, 1)
    with pytest.raises(ValueError, match="multiple of KV heads"):
        _decode(case, _config())
