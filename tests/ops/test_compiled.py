"""`--compile`: references under torch.compile give what they give without."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tp_runtime.ops import compiled
from tp_runtime.ops.activation import SiluAndMul
from tp_runtime.ops.norm import RMSNorm, add_rms_norm_reference, rms_norm_reference
from tp_runtime.ops.rotary import rotate_reference
from tp_runtime.ops.sampling.best import best_reference
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass, sample

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))),
    reason="needs a C++ compiler",
)


@pytest.fixture
def switched_on() -> Iterator[None]:
    compiled.compile_references()
    yield
    compiled.compile_references(on=False)
    compiled._compiled.clear()


def batch(rows: int, kind: SamplingClass) -> SamplingBatch:
    number = torch.arange(rows)
    return SamplingBatch(
        kind,
        temperature=torch.where(number % 3 == 1, 0.0, 0.7),
        seed=number * 77,
        position=number + 5,
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.full((rows,), 0.9),
        min_p=torch.zeros(rows),
        min_position=torch.zeros(rows, dtype=torch.int64),
    )


def test_layers_and_the_draw_go_through_torch_compile_only_when_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def fake(function: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
        asked.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(compiled, "_compiled", {})
    norm = RMSNorm(8, 1e-6, dtype=torch.float32, device="cpu")
    torch.nn.init.ones_(norm.weight)
    x, logits = torch.randn(2, 8), torch.randn(2, 50)

    def run() -> None:
        norm(x)
        norm(x, x)
        SiluAndMul()(x)
        rotate_reference(x[:, None], x[:, :4], x[:, :4])
        sample(logits, batch(2, SamplingClass.FULL))
        best_reference(logits, 0, batch(2, SamplingClass.GUMBEL))

    run()
    assert asked == []
    compiled.compile_references()
    try:
        run()
        run()
    finally:
        compiled.compile_references(on=False)
    wanted = {
        *("rms_norm_reference", "add_rms_norm_reference", "silu_and_mul_reference"),
        *("rotate_reference", "scale", "_draw", "_best_drawn"),
    }
    assert wanted <= set(asked)
    assert len(asked) == len(set(asked)), "compiled once each"


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_compiler
@pytest.mark.parametrize("rows", [5, 1])
def test_compiled_functions_equal_the_references(rows: int, switched_on: None) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, other, weight = draw(rows, 64), draw(rows, 64), draw(64)
    logits = draw(rows, 1001)
    logits[0, 3] = float("nan")
    calls: list[Callable[[], Tensor | tuple[Tensor, ...]]] = [
        lambda: rms_norm_reference(x, weight, 1e-6),
        lambda: add_rms_norm_reference(x, other, weight, 1e-6),
        lambda: SiluAndMul()(x),
        lambda: rotate_reference(x.view(rows, 4, 16), other[:, :8], other[:, 8:16]),
        *(lambda kind=kind: sample(logits, batch(rows, kind)) for kind in SamplingClass),
        *(lambda kind=kind: best_reference(logits, 96, batch(rows, kind)) for kind in (0, 1)),
    ]
    with torch.inference_mode():
        for call in calls:
            found = call()
            compiled.compile_references(on=False)
            wanted = call()
            compiled.compile_references()
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
