"""The Triton back-end against attention written out in float64: in the interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.attention.cases import Case
from tp_runtime.ops.attention.metadata import LayerKV
from tp_runtime.ops.attention.triton_backend import TritonBackend

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


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2), (20, 1)])
def test_decode_of_any_group_size(heads: tuple[int, int]) -> None:
    case = _case([33, 0, 70], [1] * 3, heads=heads)
    case.check(case.run_decode(BACKEND))


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


@pytest.mark.parametrize("window", [None, 20])
def test_what_is_prepared_for_all_layers_is_what_a_layer_would_find(window: int | None) -> None:
    case = _case([33, 0, 700], [1] * 3)
    want = case.run_decode(BACKEND, window=window)
    meta = case.decode_metadata()
    BACKEND.prepare_decode(meta, LayerKV(case.k_cache, case.v_cache), [None, window, window])
    assert set(meta.plans) == {None, window}
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    got = BACKEND.decode(case.q, case.k_cache, case.v_cache, meta, case.scale, window)
    assert torch.equal(got, want)
    case.check(got, window)


def test_one_backend_decodes_batch_after_batch_with_its_counters_zero_in_between() -> None:
    backend = TritonBackend()
    for contexts in ([300, 0, 70], [3], [64, 700]):
        case = _case(contexts, [1] * len(contexts))
        case.check(case.run_decode(backend))
        assert not any(each.any() for each in backend._counters)
    assert len(backend._counters) == 1


def test_counters_grow_and_leave_those_of_recorded_steps_alone() -> None:
    backend = TritonBackend()
    device = torch.empty(0, device=DEVICE).device
    small = backend._zeroed_counters(8, device)
    large = backend._zeroed_counters(small.numel() + 1, device)
    assert large.numel() > small.numel()
    assert backend._counters[0] is small
    assert backend._zeroed_counters(8, device) is large
