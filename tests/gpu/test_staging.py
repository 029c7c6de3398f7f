"""Weights on their way to the GPU: buffers are used again while copies are under way."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.ops.staging import copy_in

pytestmark = pytest.mark.gpu


def test_many_large_copies_arrive_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(6000, 4096, generator=generator).bfloat16() for _ in range(6)]
    for columns in (slice(0, 4096), slice(1000, 3048)):
        wanted = [source[:, columns] for source in sources]
        got = [torch.empty(w.shape, dtype=w.dtype, device="cuda") for w in wanted]
        for to, source in zip(got, wanted, strict=True):
            copy_in(to, source)
        for to, source in zip(got, wanted, strict=True):
            assert torch.equal(to.cpu(), source)
