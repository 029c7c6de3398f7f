"""The best token of a shard of the vocabulary, in a form that ranks can compare
(`ops.sampling.packed`): one int64 a row."""

from __future__ import annotations

import torch
from torch import Tensor

from tp_runtime.ops.compiled import compilable, runs_kernels
from tp_runtime.ops.sampling.packed import UNUSABLE, pack_best
from tp_runtime.ops.sampling.philox import gumbel
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass, add_noise, scale


def best_reference(local: Tensor, start: int, batch: SamplingBatch) -> Tensor:
    """Packed best of `local` [rows, columns], whose first column is vocabulary id `start`;
    greedy and temperature only. A row with NaN or +inf gives the largest int64."""
    local = local.float()
    if batch.kind == SamplingClass.GUMBEL:
        return _best_drawn(local, start, batch.temperature, batch.seed, batch.position)
    return _best(local, local, start)


@compilable
def _best_drawn(
    local: Tensor, start: int, temperature: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    noise = gumbel(seed, position, start, start + local.shape[-1])
    return _best(local, add_noise(local, scale(local, temperature), noise, temperature), start)


@compilable
def _best(local: Tensor, keyed: Tensor, start: int) -> Tensor:
    largest = local.amax(-1)
    broken = ~torch.isfinite(largest) & ~torch.isneginf(largest)
    index = keyed.argmax(-1, keepdim=True)  # the first maximum: the lowest id on ties
    best = pack_best(keyed.gather(-1, index)[:, 0], index[:, 0] + start)
    return torch.where(broken, UNUSABLE, best)


def best_of_shard(local: Tensor, start: int, batch: SamplingBatch) -> Tensor:
    """[rows, pieces] int64, whose maximum over the pieces is that of `best_reference`; on CUDA by
    one kernel. Noise there may differ in the last bit of a logarithm, equally on every GPU."""
    if not runs_kernels(local) or start % 4:
        return best_reference(local, start, batch)[:, None]
    from tp_runtime.ops.kernels.best_token import best_token  # triton: CUDA only

    temperature = batch.temperature if batch.kind == SamplingClass.GUMBEL else None
    return best_token(local, start, temperature, batch.seed, batch.position)
