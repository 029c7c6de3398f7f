"""`--compile`: the PyTorch references of norm, rotary embedding, SiLU * mul and the draw run under
torch.compile, as in the description, in place of the Triton kernels and of plain PyTorch.

The choice holds for the whole process and is made before the first call. Compiled code rounds once
where PyTorch rounds after every operation, so in bfloat16 near-ties may fall differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_compiled: dict[Callable[..., object], Callable[..., object]] = {}
_on = False


def compile_references(on: bool = True) -> None:
    """From now on `compilable` functions are compiled at their first call, each for any number of
    rows (a single row apart); that takes seconds, and on a CPU a C++ compiler."""
    global _on
    _on = on
    if on:
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # else a pool of processes that would outlive a killed worker


def runs_kernels(x: Tensor) -> bool:
    """Whether an operator on `x` that has a Triton kernel uses it."""
    return x.is_cuda and not _on


def compilable(reference: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a pure function of tensors and numbers."""

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _on:
            return reference(*args, **kwargs)
        compiled = _compiled.get(reference)
        if compiled is None:
            compiled = _compiled[reference] = torch.compile(reference, dynamic=True)
        return compiled(*args, **kwargs)  # type: ignore[return-value]

    return call
