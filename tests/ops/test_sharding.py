"""The sharding rules: tables of known cases, and properties over all shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_runtime.ops.sharding import (
    HeadShard,
    Shard,
    VocabShard,
    even_shard,
    kv_head_shard,
    tile_shard,
    vocab_shard,
)


def heads_of(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShard]:
    return [kv_head_shard(num_heads, num_kv_heads, rank, size) for rank in range(size)]


def covers_once(shards: list[Shard], total: int) -> bool:
    edges = [0, *(shard.stop for shard in shards)]
    starts = [shard.start for shard in shards]
    return starts == edges[:-1] and edges[-1] == total and all(s.size >= 0 for s in shards)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "q", "kv"),
    [
        (9, 3, 1, [9], [[0, 1, 2]]),
        (9, 3, 2, [6, 3], [[0, 1], [2]]),
        (9, 3, 3, [3, 3, 3], [[0], [1], [2]]),
        (9, 3, 4, [2, 1, 3, 3], [[0], [0], [1], [2]]),
        (12, 6, 4, [4, 4, 2, 2], [[0, 1], [2, 3], [4], [5]]),
        (16, 2, 4, [4, 4, 4, 4], [[0], [0], [1], [1]]),
        (14, 2, 3, [4, 3, 7], [[0], [0], [1]]),
        (14, 2, 4, [4, 3, 4, 3], [[0], [0], [1], [1]]),
        (32, 8, 3, [12, 12, 8], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (7, 1, 4, [2, 2, 2, 1], [[0], [0], [0], [0]]),
        (4, 4, 3, [2, 1, 1], [[0, 1], [2], [3]]),
        (9, 3, 9, [1] * 9, [[0]] * 3 + [[1]] * 3 + [[2]] * 3),
    ],
)
def test_heads_are_dealt_as_the_design_says(
    num_heads: int, num_kv_heads: int, size: int, q: list[int], kv: list[list[int]]
) -> None:
    shards = heads_of(num_heads, num_kv_heads, size)
    assert [shard.q.size for shard in shards] == q
    assert [list(range(*shard.kv)) for shard in shards] == kv


@given(kv=st.integers(1, 16), group=st.integers(1, 12), data=st.data())
def test_every_query_head_lives_once_beside_its_kv_head(
    kv: int, group: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, kv * group))
    shards = heads_of(kv * group, kv, size)
    assert covers_once([shard.q for shard in shards], kv * group)
    held: set[int] = set()
    for shard in shards:
        held.update(range(*shard.kv))
        # The attention layer pairs local query head i with local KV head i // (q / kv).
        assert shard.q.size >= 1
        assert shard.q.size % shard.kv.size == 0
        share = shard.q.size // shard.kv.size
        for local, head in enumerate(range(*shard.q)):
            assert shard.kv.start + local // share == head // group
    assert held == set(range(kv))
    if kv >= size:
        assert covers_once([shard.kv for shard in shards], kv)
        sizes = [shard.kv.size for shard in shards]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_more_ranks_than_query_heads_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"size 10 is larger than the model's 9 query heads"):
        kv_head_shard(9, 3, 0, 10)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 2), (4, 8), (0, 1), (4, 0)])
def test_heads_that_form_no_groups_are_refused(num_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"{num_heads} query heads .* {num_kv_heads} KV heads"):
        kv_head_shard(num_heads, num_kv_heads, 0, 1)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    for shard in (
        lambda: even_shard(5, rank, 3),
        lambda: kv_head_shard(9, 3, rank, 3),
        lambda: tile_shard(256, rank, 3),
        lambda: vocab_shard(256, rank, 3),
    ):
        with pytest.raises(ValueError, match=f"Rank {rank} is not a rank of 3"):
            shard()


@pytest.mark.parametrize(
    ("total", "size", "sizes"),
    [
        (1536, 1, [1536]),
        (1536, 2, [768, 768]),
        (1536, 5, [384, 384, 256, 256, 256]),
        (12288, 3, [4096, 4096, 4096]),
        (4864, 3, [1664, 1664, 1536]),
        (200, 2, [128, 72]),
        (100, 3, [64, 32, 4]),
        (1000, 4, [256, 256, 256, 232]),
        (2, 3, [1, 1, 0]),
    ],
)
def test_tiles_stay_whole_and_shrink_only_when_ranks_would_stay_empty(
    total: int, size: int, sizes: list[int]
) -> None:
    assert [tile_shard(total, rank, size).size for rank in range(size)] == sizes


@given(total=st.integers(1, 60_000), size=st.integers(1, 40))
def test_tiles_cover_everything_once(total: int, size: int) -> None:
    shards = [tile_shard(total, rank, size) for rank in range(size)]
    assert covers_once(shards, total)
    assert all(shard.size for shard in shards[: min(size, total)])


@pytest.mark.parametrize(
    ("vocab", "size", "expected"),
    [
        (151_936, 1, [(0, 151_936)]),
        (151_936, 3, [(0, 50_688), (50_688, 101_376), (101_376, 151_936)]),
        (49_152, 2, [(0, 24_576), (24_576, 49_152)]),
        (101, 4, [(0, 32), (32, 64), (64, 96), (96, 101)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_vocabulary_ranges(vocab: int, size: int, expected: list[tuple[int, int]]) -> None:
    shards = [vocab_shard(vocab, rank, size) for rank in range(size)]
    assert [(shard.start, shard.stop) for shard in shards] == expected


@given(vocab=st.integers(1, 300_000), size=st.integers(1, 16))
def test_vocabulary_is_covered_once_at_one_width(vocab: int, size: int) -> None:
    shards = [vocab_shard(vocab, rank, size) for rank in range(size)]
    assert covers_once([Shard(s.start, s.stop) for s in shards], vocab)
    assert len({shard.padded for shard in shards}) == 1
    for rank, shard in enumerate(shards):
        # What `rank * padded + column` means for sampling without a gather.
        assert shard.start == min(rank * shard.padded, vocab)
        assert shard.size <= shard.padded
    assert isinstance(shards[0], VocabShard)


@given(vocab=st.integers(64, 300_000), size=st.integers(1, 8))
def test_no_rank_is_left_without_vocabulary(vocab: int, size: int) -> None:
    assert all(vocab_shard(vocab, rank, size).size for rank in range(size))
