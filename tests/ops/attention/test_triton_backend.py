"""The Triton back-end against attention written out in float64: in the interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.attention.cases import Case
from tp_runtime.ops.attention.triton_backend import TritonBackend
from tp_runtime.ops.kernels.combine_splits import combine_splits
from tp_runtime.ops.kernels.paged_decode import paged_decode, splits_for

BACKEND = TritonBackend()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WINDOWS = [None, 1, 20]


def _case(contexts: list[int], new: list[int], **shape: Any) -> Case:
    return Case.make(contexts, new, device=DEVICE, **shape)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "cached"), [((2, 1), False), ((3, 1), True), ((4, 2), True)])
def test_prefill_of_fresh_sequences(
    window: int | None, heads: tuple[int, int], cached: bool
) -> None:
    """Longer than a tile of queries, longer than a tile of keys, one block, one token."""
    lengths = [1, 16, 75]
    case = _case(lengths, lengths, heads=heads)
    case.check(case.run_prefill(BACKEND, cached=cached, window=window), window)


@pytest.mark.parametrize("window", [None, 1, 20, 64])
def test_prefill_over_a_cached_prefix(window: int | None) -> None:
    case = _case([17, 140, 33], [1, 7, 33], heads=(2, 1))
    case.check(case.run_prefill(BACKEND, cached=True, window=window), window)


def test_prefill_of_keys_that_are_views_of_a_packed_projection() -> None:
    lengths = [5, 18]
    case = _case(lengths, lengths, head_dim=64)
    k, v = case.new_keys()
    packed = torch.cat((case.q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
    q, k, v = packed.split([4 * 64, 2 * 64, 2 * 64], dim=1)
    out = BACKEND.prefill(
        q.unflatten(1, (4, 64)),
        k.unflatten(1, (2, 64)),
        v.unflatten(1, (2, 64)),
        case.k_cache,
        case.v_cache,
        case.prefill_metadata(cached=False),
        case.scale,
        None,
    )
    case.check(out)


def test_prefill_passes_over_sequences_without_new_tokens() -> None:
    case = _case([17, 5, 9], [3, 0, 9])
    case.check(case.run_prefill(BACKEND, cached=True))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("splits", "block_size"), [(1, 24), (3, 1), (6, 16)])
def test_decode_in_any_number_of_shares(window: int | None, block_size: int, splits: int) -> None:
    """More shares than some rows have tokens, and padding rows that have none."""
    contexts = [1, 0, 17, 150]
    case = _case(contexts, [1] * 4, heads=(2, 1), block_size=block_size)
    meta = case.decode_metadata()
    out = paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        meta.context_lens,
        meta.block_tables,
        case.scale,
        window,
        splits,
    )
    case.check(out, window)
    assert not out[1].any()


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2), (20, 1)])
def test_decode_of_any_group_size(heads: tuple[int, int]) -> None:
    case = _case([33, 0, 70], [1] * 3, heads=heads)
    case.check(case.run_decode(BACKEND, max_context_len=4096))


NEEDS_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no bfloat16 dot")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)],
)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_head_sizes_and_dtypes(dtype: torch.dtype, head_dim: int) -> None:
    decode = _case([33, 5], [1, 1], heads=(2, 1), head_dim=head_dim, dtype=dtype)
    decode.check(decode.run_decode(BACKEND))
    prefill = _case([20, 5], [8, 5], heads=(2, 1), head_dim=head_dim, dtype=dtype)
    prefill.check(prefill.run_prefill(BACKEND, cached=True))


def test_empty_batches_give_empty_outputs() -> None:
    case = _case([3], [1])
    meta = case.decode_metadata()
    none = case.q[:0]
    out = paged_decode(
        none, case.k_cache, case.v_cache, meta.context_lens[:0], meta.block_tables[:0], 1.0, None, 2
    )
    assert out.shape == none.shape


def test_combining_weighs_shares_by_their_sums() -> None:
    parts = torch.randn(2, 3, 5, 24, device=DEVICE)
    lse = 4 * torch.randn(2, 3, 5, device=DEVICE)
    lse[0, 0, 3:] = float("-inf")
    lse[1, 2] = float("-inf")
    want = (parts * lse.softmax(-1).nan_to_num(0).unsqueeze(-1)).sum(2)
    torch.testing.assert_close(combine_splits(parts, lse, torch.float32), want)


def test_shares_fill_the_processors_and_are_not_too_short() -> None:
    assert splits_for(rows=1, kv_heads=8, max_context_len=32_768, processors=132) == 33
    assert splits_for(rows=1, kv_heads=8, max_context_len=1024, processors=132) == 4
    assert splits_for(rows=256, kv_heads=8, max_context_len=32_768, processors=132) == 1
    assert splits_for(rows=0, kv_heads=1, max_context_len=0, processors=1) == 1
