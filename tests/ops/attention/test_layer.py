"""The attention layer: stores, splits the batch, and gives each rank its heads' part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gloo_pool import GlooPool
from tests.ops.attention.cases import Case
from tp_runtime.ops.attention.layer import Attention
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sharding import kv_head_shard

Pools = Callable[[int], GlooPool]
HEAD_DIM = 16


def _layer(heads: int, kv_heads: int, window: int | None = None) -> Attention:
    return Attention(heads, kv_heads, HEAD_DIM, HEAD_DIM**-0.5, window, ReferenceBackend())


def _without_last(case: Case) -> tuple[LayerKV, Tensor]:
    """The case's cache as it is before the step, and the slots the step has to fill."""
    kv = LayerKV(case.k_cache.clone(), case.v_cache.clone())
    size = kv.k.shape[1]
    slots: list[int] = []
    for row, (context, new) in enumerate(zip(case.contexts, case.new, strict=True)):
        for position in range(context - new, context):
            block = int(case.block_tables[row, position // size])
            slots.append(block * size + position % size)
    kv.k.flatten(0, 1)[slots] = float("nan")
    kv.v.flatten(0, 1)[slots] = float("nan")
    return kv, torch.tensor(slots)


@pytest.mark.parametrize("window", [None, 16])
def test_a_mixed_step_stores_then_attends_decode_rows_and_prefill(window: int | None) -> None:
    decode = Case.make([5, 33], [1, 1], head_dim=HEAD_DIM)
    prefill = Case.make([20, 7], [6, 7], head_dim=HEAD_DIM)
    kv_decode, slots_decode = _without_last(decode)
    kv_prefill, slots_prefill = _without_last(prefill)
    blocks = len(decode.k_cache)
    kv = LayerKV(torch.cat((kv_decode.k, kv_prefill.k)), torch.cat((kv_decode.v, kv_prefill.v)))
    prefill_meta = prefill.prefill_metadata(cached=True)
    prefill_meta.block_tables = prefill.block_tables + blocks
    meta = AttentionMetadata(
        torch.cat((slots_decode, slots_prefill + blocks * 16)),
        decode.decode_metadata(),
        prefill_meta,
    )
    new = [decode.new_keys(), prefill.new_keys()]
    k, v = (torch.cat([pair[index] for pair in new]) for index in (0, 1))
    out = _layer(4, 2, window)(torch.cat((decode.q, prefill.q)), k, v, kv, meta)
    assert out.shape == (15, 4 * HEAD_DIM)
    heads = out.unflatten(-1, (4, HEAD_DIM))
    decode.check(heads[:2], window)
    prefill.check(heads[2:], window)
    assert torch.equal(kv.k[:blocks].nan_to_num(9), decode.k_cache.nan_to_num(9))
    assert torch.equal(kv.v[blocks:].nan_to_num(9), prefill.v_cache.nan_to_num(9))


def test_padding_rows_beside_live_ones_change_nothing() -> None:
    """Rows a graph adds to reach its size: slot -1, no context, keys that are NaN."""
    case = Case.make([5, 33], [1, 1], head_dim=HEAD_DIM)
    padded = Case.make([5, 33], [1, 1], head_dim=HEAD_DIM)
    padded.contexts += [0, 0]
    padded.block_tables = torch.cat((case.block_tables, case.block_tables[:1].repeat(2, 1)))
    kv, slots = _without_last(case)
    k, v = case.new_keys()
    alone = _layer(4, 2)(case.q, k, v, kv, AttentionMetadata(slots, case.decode_metadata()))
    kv, slots = _without_last(case)
    nan = torch.full((2, 2, HEAD_DIM), float("nan"))
    meta = AttentionMetadata(torch.cat((slots, torch.tensor([-1, -1]))), padded.decode_metadata())
    q = torch.cat((case.q, torch.zeros(2, 4, HEAD_DIM)))
    both = _layer(4, 2)(q, torch.cat((k, nan)), torch.cat((v, nan)), kv, meta)
    assert torch.equal(both[:2], alone)
    assert not both[2:].any()
    assert torch.equal(kv.k.nan_to_num(9), case.k_cache.nan_to_num(9))


def test_heads_that_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="3 local query heads cannot share 2 local KV heads"):
        _layer(3, 2)


def _attend(group: TPGroup, num_heads: int, num_kv_heads: int) -> Tensor:
    case = Case.make([5, 33], [1, 1], heads=(num_heads, num_kv_heads), head_dim=HEAD_DIM)
    shard = kv_head_shard(num_heads, num_kv_heads, group.rank, group.size)
    q = slice(shard.q.start, shard.q.stop)
    own = slice(shard.kv.start, shard.kv.stop)
    k, v = case.new_keys()
    whole, slots = _without_last(case)
    kv = LayerKV(whole.k[:, :, own].contiguous(), whole.v[:, :, own].contiguous())
    meta = AttentionMetadata(slots, case.decode_metadata())
    return _layer(shard.q.size, shard.kv.size)(case.q[:, q], k[:, own], v[:, own], kv, meta)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (12, 6), (4, 2), (7, 1)])
def test_the_ranks_outputs_join_to_the_whole_layers(
    gloo_pool: Pools, size: int, num_heads: int, num_kv_heads: int
) -> None:
    """Also where KV heads are repeated, or shares are uneven."""
    joined = torch.cat(gloo_pool(size).run(_attend, num_heads, num_kv_heads), dim=-1)
    case = Case.make([5, 33], [1, 1], heads=(num_heads, num_kv_heads), head_dim=HEAD_DIM)
    case.check(joined.unflatten(-1, (num_heads, HEAD_DIM)))
