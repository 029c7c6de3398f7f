"""Sum over the ranks, residual add and norm as one call of the communicator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tp_runtime.ops import normed_linear as steps
from tp_runtime.ops.activation import SiluAndMul
from tp_runtime.ops.group import SingleCommunicator, TPGroup
from tp_runtime.ops.linear import MergedColumnParallelLinear
from tp_runtime.ops.norm import RMSNorm, add_rms_norm_reference, rms_norm_reference
from tp_runtime.ops.partial import Partial

HIDDEN, TOKENS = 24, 3
MAKE = {"dtype": torch.float32, "device": "cpu"}


class Fusing(SingleCommunicator):
    """The other rank's term is as large as this one's. Takes up to `rows` rows in one call."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.sums, self.fused = 0, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return 2 * x  # not in place

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if x.shape[0] > self._rows:
            return None
        self.fused += 1
        if residual is None:
            return rms_norm_reference(2 * x, weight, eps), 2 * x
        return add_rms_norm_reference(2 * x, residual, weight, eps)


@pytest.mark.parametrize("rows", [TOKENS, TOKENS - 1], ids=["fits", "does not"])
@pytest.mark.parametrize("first", [True, False], ids=["first layer", "later"])
def test_a_partial_sum_is_made_once_whoever_makes_it(
    rows: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "runs_kernels", lambda x: True)  # as on a GPU
    torch.manual_seed(0)
    norm = RMSNorm(HIDDEN, 1e-6, **MAKE)
    norm.weight.data.normal_()
    linear = MergedColumnParallelLinear(HIDDEN, [16, 16], group=TPGroup.single(), **MAKE)
    linear.weight.data.normal_()
    term, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    given = None if first else residual
    before = torch.zeros_like(term) if first else residual
    normed, total = add_rms_norm_reference(2 * term, before, norm.weight, norm.eps)
    comm = Fusing(rows)
    x = Partial(term, TPGroup(0, 2, comm))
    calls = [steps.add_norm(x, given, norm), steps.normed_linear(x, given, norm, linear)]
    wanted = [normed, linear(normed)]
    if not first:
        act = SiluAndMul()
        calls.append(steps.normed_gate_up(x, residual, norm, linear, act))
        wanted.append(act(linear(normed)))
    for (got, summed), want in zip(calls, wanted, strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(summed, total)
    assert (comm.fused, comm.sums) == ((len(calls), 0) if rows == TOKENS else (0, len(calls)))
