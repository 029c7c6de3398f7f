"""Every tile of every sequence belongs to one team, and the teams have about as many."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.kernels.decode_plan import DecodeConfig, plan_decode

TILE = 16


def plan(
    contexts: list[int],
    device: torch.device,
    teams: int = 5,
    least: int = 1,
    window: int | None = None,
    kv_heads: int = 2,
) -> list[list[int]]:
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    config = DecodeConfig(TILE, 4, 3, teams * kv_heads + kv_heads - 1, least)
    return plan_decode(lengths, kv_heads, window, config).tolist()


def tiles(context: int, window: int | None = None) -> int:
    skipped = 0 if window is None else max(context - window, 0) // TILE
    return max(1, -(-context // TILE) - skipped)


def check(rows: list[list[int]], contexts: list[int], window: int | None = None) -> list[int]:
    """The parts follow each other and name the right row, context and tile; their sizes."""
    numbers = [tiles(context, window) for context in contexts]
    line = [(row, tile) for row, number in enumerate(numbers) for tile in range(number)]
    at, sizes = 0, []
    for row, context, number, tile, begin, end, _, _ in rows:
        if begin == end:
            continue
        assert begin == at
        assert (row, tile) == line[begin]
        assert (context, number) == (contexts[row], numbers[row])
        sizes.append(end - begin)
        at = end
    assert at == len(line)
    return sizes


@pytest.mark.parametrize("contexts", [[700, 3, 0, 40], [2000], [1] * 3 + [1500], [900, 0, 0, 0]])
def test_uneven_sequences_are_cut_into_equal_parts(
    contexts: list[int], device: torch.device
) -> None:
    rows = plan(contexts, device)
    sizes = check(rows, contexts)
    assert len(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    for _, _, _, _, begin, end, share, longer in rows:
        assert end - begin == share + (begin < longer * (share + 1))


@pytest.mark.parametrize("number", [1, 4, 5, 6, 11, 20, 600])
def test_even_sequences_stay_whole(number: int, device: torch.device) -> None:
    contexts = [300 + 7 * (i % 3) for i in range(number)]
    rows = plan(contexts, device, teams=5 if number < 600 else 70)
    check(rows, contexts)
    assert all(tile == 0 for _, _, _, tile, begin, end, _, _ in rows if begin < end)


def test_a_part_has_a_least_number_of_tiles(device: torch.device) -> None:
    contexts = [10 * TILE + 480]
    assert len(check(plan(contexts, device, teams=30, least=8), contexts)) == 5
    assert len(check(plan(contexts, device, teams=30, least=100), contexts)) == 1


@pytest.mark.parametrize("window", [1, TILE, 50])
def test_only_what_a_window_shows_counts(window: int, device: torch.device) -> None:
    contexts = [5, 49, 50, 51, 3000, 0, TILE, TILE + 1]
    check(plan(contexts, device, window=window), contexts, window)


def test_a_long_sequence_among_many_short_ones_is_shared(device: torch.device) -> None:
    contexts = [20] * 255 + [20_000]
    sizes = check(plan(contexts, device, teams=66, kv_heads=8), contexts)
    assert max(sizes) - min(sizes) <= 1


def test_more_kv_heads_than_programs_make_one_team(device: torch.device) -> None:
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    config = DecodeConfig(TILE, 4, 3, 3, 1)
    check(plan_decode(lengths, 8, None, config).tolist(), [40, 7])


def test_no_sequences_leave_no_parts(device: torch.device) -> None:
    assert all(begin == end for _, _, _, _, begin, end, _, _ in plan([], device))
