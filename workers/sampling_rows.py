"""Sampling parameters of the rows of a step, from plan form to the device form the sampler takes.

The result is cached while the same rows keep their places, so a steady decode step builds nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from tp_runtime.messages import RowMask, RowSampling
from tp_runtime.ops.sampling.sampler import (
    Allowed,
    Entries,
    Penalties,
    SamplingBatch,
    SamplingClass,
)
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.host_copy import to_device


def is_truncated(s: RowSampling) -> bool:
    return s.temperature != 0 and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


def sampling_class(params: list[RowSampling]) -> SamplingClass:
    """The least class that serves all of `params`."""
    if any(is_truncated(s) or s.has_penalties or s.bias_ids or s.blocked_ids for s in params):
        return SamplingClass.FULL
    if any(s.temperature != 0 for s in params):
        return SamplingClass.GUMBEL
    return SamplingClass.GREEDY


def _entries(ids_of_rows: list[bytes], values: list[float], device: torch.device) -> Entries | None:
    """Packed ids per row and one value per id, to device form; None when there are none."""
    ids = [np.frombuffer(packed, dtype=np.int32) for packed in ids_of_rows]
    lengths = [len(i) for i in ids]
    if not any(lengths):
        return None
    pairs = np.stack([np.repeat(np.arange(len(ids)), lengths), np.concatenate(ids)])
    device_pairs = to_device(pairs.astype(np.int64), device)
    device_values = to_device(np.array(values, dtype=np.float32), device)
    return Entries(device_pairs[0], device_pairs[1], device_values)


def allowed_ids(
    masks: list[RowMask], host_rows: list[int], vocab: int, device: torch.device
) -> Allowed:
    """A plan's masks, to device form; `host_rows` are the sampled rows in order."""
    bits = np.zeros((len(masks), -(-vocab // 8)), dtype=np.uint8)
    for target, mask in zip(bits, masks, strict=True):
        if mask.bits:
            given = np.frombuffer(mask.bits, dtype=np.uint8)[: len(target)]
            target[: len(given)] = given
        else:
            ids = np.frombuffer(mask.ids, dtype=np.int32)
            np.bitwise_or.at(target, ids // 8, np.left_shift(1, ids % 8).astype(np.uint8))
    rows = to_device(np.array([host_rows.index(m.row) for m in masks], dtype=np.int64), device)
    return Allowed(rows, to_device(bits, device), torch.ones_like(rows, dtype=torch.bool))


def build_batch(
    params: list[RowSampling], floats: Tensor, ints: Tensor, position: Tensor
) -> SamplingBatch:
    """`floats` [6, rows] and `ints` [3, rows] as in RowParameters; `position` [rows] int64 of the
    tokens to be drawn. Penalties are added by `SamplingRows`."""
    return SamplingBatch(
        kind=sampling_class(params),
        temperature=floats[0],
        top_p=floats[1],
        min_p=floats[2],
        seed=ints[0],
        top_k=ints[1],
        min_position=ints[2],
        position=position,
        bias=_entries(
            [s.bias_ids for s in params],
            [v for s in params for v in s.bias_values],
            position.device,
        ),
        blocked=_entries(
            [s.blocked_ids for s in params],
            [float("-inf")] * sum(len(s.blocked_ids) // 4 for s in params),
            position.device,
        ),
        truncated=any(is_truncated(s) for s in params),
    )


class SamplingRows:
    """Builds and caches `SamplingBatch` for lists of rows of one batch state."""

    def __init__(self, state: BatchState) -> None:
        self._state = state
        self._key: tuple[int, tuple[int, ...]] | None = None
        self._batch: SamplingBatch | None = None
        self._penalties: tuple[Tensor, Tensor, Tensor] | None = None

    def kind(self, host_rows: list[int]) -> SamplingClass:
        """The least class that serves these rows."""
        return sampling_class([self._state.rows[r].sampling for r in host_rows])

    def batch(
        self,
        rows: Tensor,
        host_rows: list[int],
        position: Tensor,
        masks: list[RowMask],
    ) -> SamplingBatch:
        """`rows` [n] int64 on the device and the same rows on the host; `position` [n] of the
        tokens to be drawn; `masks` of this step."""
        key = (self._state.sampling_version, tuple(host_rows))
        if self._batch is None or key != self._key:
            params = [self._state.rows[r].sampling for r in host_rows]
            floats = self._state.parameters.floats[:, rows]
            ints = self._state.parameters.ints[:, rows]
            self._key, self._batch = key, build_batch(params, floats, ints, position)
            has_penalties = any(s.has_penalties for s in params)
            self._penalties = (floats[3], floats[4], floats[5]) if has_penalties else None
        batch = dataclasses.replace(self._batch, position=position)
        counts = self._state.token_counts
        if self._penalties is not None and counts is not None:
            batch.penalties = Penalties(
                counts.in_prompt[rows], counts.counts[rows], *self._penalties
            )
        if masks:
            batch.kind = SamplingClass.FULL
            batch.allowed = allowed_ids(masks, host_rows, self._state.vocab_size, position.device)
        return batch
