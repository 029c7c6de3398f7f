"""cuBLASLt's binding without a GPU: why it cannot be had. The rest needs one (tests/gpu)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tp_runtime.ops import cublas_lt
from tp_runtime.ops.cublas_lt import CublasLt, CublasLtUnavailableError, Problem

CPU = torch.device("cpu")


def test_a_torch_without_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CublasLtUnavailableError, match="without CUDA"):
        CublasLt(CPU)


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(CublasLtUnavailableError, match=r"libcublasLt\.so\.99 cannot be used"):
        CublasLt(CPU)


def test_a_library_without_the_functions_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(CublasLtUnavailableError, match=r"libcublasLt\.so\.13 .*cublasLtCreate"):
        CublasLt(CPU)


def test_records_have_the_librarys_sizes() -> None:
    assert ctypes.sizeof(cublas_lt._Algorithm) == cublas_lt.ALGORITHM_BYTES
    assert ctypes.sizeof(cublas_lt._Proposal) == 64 + 8 + 4 + 4 + 16


def test_a_problem_knows_the_strides() -> None:
    x, weight, y = torch.zeros(5, 24)[:, :8], torch.zeros(3, 8), torch.zeros(5, 6)[:, :3]
    assert Problem.of(x, weight, y) == (5, 3, 8, torch.float32, 24, 6)
