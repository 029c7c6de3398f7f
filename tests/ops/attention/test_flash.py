"""The FlashAttention back-ends.

On a CPU: against stand-ins with the packages' documented signatures and semantics, so that every
argument's meaning is checked. On a GPU: the packages themselves, where they are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.ops.attention.cases import Case
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.flash2 import FlashAttention2Backend
from tp_runtime.ops.attention.flash3 import FlashAttention3Backend
from tp_runtime.ops.attention.hopper import HopperBackend
from tp_runtime.ops.attention.reference import cached_tokens, causal_attention

MODULES = {
    FlashAttention2Backend: "flash_attn",
    FlashAttention3Backend: "flash_attn_interface",
    HopperBackend: "flash_attn_interface",  # decodes with the kernel of this project
}
BACKENDS = list(MODULES)


def _window(window_size: tuple[int, int]) -> int | None:
    """(-1, -1): all; otherwise [i - left, i + right], which for causal attention ends at i."""
    if window_size == (-1, -1):
        return None
    left, right = window_size
    assert right == 0
    return left + 1


def _varlen(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    starts: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    out = torch.zeros_like(q)
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        new = slice(int(starts[index]), int(starts[index + 1]))
        if new.start < new.stop and len(k):
            out[new] = causal_attention(q[new], k, v, scale, window)
    return out


def _pages(cache: Tensor, table: Tensor, lengths: list[int]) -> list[Tensor]:
    return [
        cached_tokens(cache, row, 0, length) for row, length in zip(table, lengths, strict=True)
    ]


def _flash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert causal
    assert dropout_p == softcap == 0.0
    lengths = cu_seqlens_k.diff().tolist()
    assert max(cu_seqlens_q.diff().tolist()) <= max_seqlen_q
    assert max(lengths) <= max_seqlen_k
    if block_table is None:
        keys, values = k.split(lengths), v.split(lengths)
    else:
        keys, values = _pages(k, block_table, lengths), _pages(v, block_table, lengths)
    return _varlen(q, keys, values, cu_seqlens_q, softmax_scale, _window(window_size))


def _flash2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert causal
    assert k is None
    lengths = cache_seqlens.tolist()
    starts = torch.arange(len(q) + 1) * q.shape[1]
    keys, values = _pages(k_cache, block_table, lengths), _pages(v_cache, block_table, lengths)
    out = _varlen(q.flatten(0, 1), keys, values, starts, softmax_scale, _window(window_size))
    return out.unflatten(0, q.shape[:2])


def _flash3_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    return _flash2_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip


def _flash3_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    if cu_seqlens_q is None:
        return _flash2_kvcache(
            q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        )  # fmt: skip
    assert causal
    assert max(cu_seqlens_q.diff().tolist()) <= max_seqlen_q
    lengths = cache_seqlens.tolist()
    keys, values = _pages(k_cache, page_table, lengths), _pages(v_cache, page_table, lengths)
    return _varlen(q, keys, values, cu_seqlens_q, softmax_scale, _window(window_size))


STAND_INS = {
    "flash_attn": SimpleNamespace(
        flash_attn_varlen_func=_flash2_varlen, flash_attn_with_kvcache=_flash2_kvcache
    ),
    "flash_attn_interface": SimpleNamespace(
        flash_attn_varlen_func=_flash3_varlen, flash_attn_with_kvcache=_flash3_kvcache
    ),
}


@pytest.fixture(params=BACKENDS, ids=lambda cls: cls.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    module = MODULES[request.param]
    monkeypatch.setitem(sys.modules, module, STAND_INS[module])
    return request.param()


@pytest.mark.parametrize("window", [None, 1, 20])
def test_arguments_mean_what_the_package_documents(
    backend: AttentionBackend, window: int | None
) -> None:
    if torch.cuda.is_available() and isinstance(backend, HopperBackend):
        pytest.skip("its decode kernel takes no tensors of the CPU where there is a GPU")
    _check(backend, window, "cpu", torch.float32, backend.default_block_size())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", BACKENDS)
def test_the_package_itself_on_the_gpu(
    cls: type[AttentionBackend], dtype: torch.dtype, window: int | None
) -> None:
    """NaN in slots that hold no token must not reach the output here either."""
    if importlib.util.find_spec(MODULES[cls]) is None:
        pytest.skip(f"{MODULES[cls]} is not installed")
    reason = cls.supports(64, dtype, None, window, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    _check(cls(), window, "cuda", dtype, cls.default_block_size())


def _check(
    backend: AttentionBackend,
    window: int | None,
    device: str,
    dtype: torch.dtype,
    block_size: int,
) -> None:
    shape = {"head_dim": 64, "device": device, "dtype": dtype, "block_size": block_size}
    fresh = Case.make([1, 16, 300], [1, 16, 300], **shape)
    fresh.check(fresh.run_prefill(backend, cached=False, window=window), window)
    fresh.check(fresh.run_prefill(backend, cached=True, window=window), window)
    chunk = Case.make([17, 300, 33], [1, 7, 33], **shape)
    chunk.check(chunk.run_prefill(backend, cached=True, window=window), window)
    decode = Case.make([1, 16, 0, 300], [1] * 4, **shape)
    out = decode.run_decode(backend, window=window)
    decode.check(out, window)
    assert not out[2].any()


def test_the_operator_of_flash_attention_3_is_called_without_its_wrapper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrapper (torch.library.custom_op) would import torch._dynamo at its first call."""

    def direct() -> str:
        return "called"

    module = SimpleNamespace(_flash_attn_forward=SimpleNamespace(_init_fn=direct))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    FlashAttention3Backend()
    FlashAttention3Backend()  # a second time there is nothing left to unwrap
    assert module._flash_attn_forward() == "called"
