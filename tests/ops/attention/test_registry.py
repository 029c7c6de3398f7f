"""Choosing a back-end: order, reasons, and errors that say what to do."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import Any

import pytest
import torch

from tp_runtime.ops.attention.registry import BACKENDS, choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _choose(name: str = "auto", **changes: Any) -> tuple[str, str]:
    asked: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "block_size": None,
        "windows": [None],
        "device": CPU,
    }
    backend, reason = choose_backend(name, **{**asked, **changes})
    return backend.name, reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that only answers questions: its compute capability, and the modules installed."""
    found: dict[str, Any] = {"capability": (9, 0), "modules": {"triton"}}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (
            importlib.machinery.ModuleSpec(name, None) if name in found["modules"] else None
        ),
    )
    for cls in BACKENDS.values():
        monkeypatch.setattr(cls, "__init__", lambda self: None)
    return found


def test_a_cpu_gets_the_reference_and_the_reasons_why() -> None:
    name, reason = _choose()
    assert name == "reference"
    for other in ("flash-attn-3+triton", "flash-attn-3", "flash-attn-2", "triton"):
        assert f"not {other}: it needs a CUDA GPU and the device is cpu" in reason


@pytest.mark.parametrize(
    ("modules", "capability", "changes", "expected"),
    [
        ({"flash_attn_interface", "flash_attn", "triton"}, (9, 0), {}, "flash-attn-3+triton"),
        ({"flash_attn_interface", "triton"}, (9, 0), {"windows": [9, None]}, "flash-attn-3+triton"),
        ({"flash_attn_interface", "flash_attn"}, (9, 0), {}, "flash-attn-3"),
        ({"flash_attn", "triton"}, (9, 0), {}, "flash-attn-2"),
        ({"flash_attn_interface", "flash_attn", "triton"}, (8, 0), {}, "flash-attn-2"),
        ({"flash_attn_interface", "flash_attn", "triton"}, (10, 0), {}, "flash-attn-2"),
        ({"flash_attn", "triton"}, (9, 0), {"block_size": 16}, "triton"),
        ({"flash_attn", "triton"}, (9, 0), {"block_size": 512}, "flash-attn-2"),
        ({"flash_attn_interface", "triton"}, (9, 0), {"dtype": torch.float32}, "triton"),
        ({"flash_attn_interface", "triton"}, (9, 0), {"head_size": 100}, "triton"),
        ({"triton"}, (9, 0), {}, "triton"),
        ({"triton"}, (9, 0), {"head_size": 512}, "reference"),
        ({"triton"}, (7, 5), {}, "reference"),
        (set(), (9, 0), {}, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(
    gpu: dict[str, Any],
    modules: set[str],
    capability: tuple[int, int],
    changes: dict[str, Any],
    expected: str,
) -> None:
    gpu.update(modules=modules, capability=capability)
    assert _choose(device=CUDA, **changes)[0] == expected


def test_the_reason_names_what_a_better_one_lacks(gpu: dict[str, Any]) -> None:
    assert _choose(device=CUDA)[1] == (
        "not flash-attn-3+triton: the module flash_attn_interface (FlashAttention-3) is not "
        "installed; "
        "not flash-attn-3: the module flash_attn_interface (FlashAttention-3) is not installed; "
        "not flash-attn-2: the package flash_attn (FlashAttention-2) is not installed"
    )
    gpu["modules"].add("flash_attn_interface")
    assert _choose(device=CUDA)[1] == "the fastest there is"
    assert _choose("reference", device=CUDA) == ("reference", "as asked")
    assert _choose("flash-attn-3", device=CUDA) == ("flash-attn-3", "as asked")
    assert _choose("triton", device=CUDA) == ("triton", "as asked")


def test_a_name_that_cannot_do_it_is_refused_with_the_reason(gpu: dict[str, Any]) -> None:
    gpu["modules"] = {"flash_attn", "triton"}
    with pytest.raises(ValueError, match=r"flash-attn-2 cannot .* multiples of 256 tokens, not 16"):
        _choose("flash-attn-2", device=CUDA, block_size=16)
    with pytest.raises(ValueError, match=r"flash-attn-3 cannot be used here: the module .* auto"):
        _choose("flash-attn-3", device=CUDA)
    with pytest.raises(ValueError, match=r"triton cannot .*needs a CUDA GPU.*flash-attn-2, ref"):
        _choose("triton", device=CPU)


def test_a_broken_package_is_passed_over_or_named(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flash_attn compiled for another torch is found, and fails at its import."""

    def broken(self: object) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    gpu["modules"] = {"flash_attn", "triton"}
    monkeypatch.setattr(BACKENDS["flash-attn-2"], "__init__", broken)
    name, reason = _choose(device=CUDA)
    assert name == "triton"
    assert "not flash-attn-2: its package is installed and cannot be loaded (undefined" in reason
    with pytest.raises(ValueError, match=r"flash-attn-2 cannot be used here: .*undefined symbol"):
        _choose("flash-attn-2", device=CUDA)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"no attention back-end .fast.; give auto, flash-attn-3.triton, flash.*, reference",
    ):
        _choose("fast")


def test_a_block_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block size of 0"):
        _choose(block_size=0)
