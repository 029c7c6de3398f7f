"""Numeric sampling parameters of every row, on the device, so that a replayed graph reads them.

Sparse parameters (logit bias, blocked ids) and what a batch can skip are decided on the host, in
`sampling_rows`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tp_runtime.messages import NewRow
from tp_runtime.workers.host_copy import to_device

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_INTS = ("seed", "top_k", "min_position")


class RowParameters:
    """`floats` [6, rows] float32 and `ints` [3, rows] int64, in the order of the names above."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.floats = torch.zeros((len(_FLOATS), max_rows), device=device)
        self.ints = torch.zeros((len(_INTS), max_rows), dtype=torch.int64, device=device)

    def add(self, rows: list[NewRow]) -> None:
        """New rows of a plan, two small copies for all of them."""
        device = self.floats.device
        at = to_device(np.array([new.row for new in rows], dtype=np.int64), device)
        floats = [[getattr(new.sampling, name) for new in rows] for name in _FLOATS]
        ints = [[getattr(new.sampling, name) for new in rows] for name in _INTS]
        self.floats[:, at] = to_device(np.array(floats, dtype=np.float32), device)
        self.ints[:, at] = to_device(np.array(ints, dtype=np.int64), device)

    def move(self, source: Tensor, target: Tensor) -> None:
        """`source`, `target` [n] int64; all sources are read before any target is written."""
        self.floats[:, target] = self.floats[:, source]
        self.ints[:, target] = self.ints[:, source]
