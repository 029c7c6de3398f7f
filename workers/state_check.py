"""Comparing the batch state of all ranks, on the device, in the step that asks for it.

Every rank must hold the same rows: last id, position, block table. A rank that does not computes
something else from here on, which shows much later as odd text or as a collective that hangs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp_runtime.errors import WorkerFailedError
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.host_copy import PendingCopy


class StateCheck:
    """Collective: the checksums of every rank on their way to this host."""

    def __init__(self, state: BatchState, group: TPGroup, step: int) -> None:
        self._step = step
        self._sums = PendingCopy(torch.stack(group.comm.all_gather(state.checksum())))

    def ready(self) -> bool:
        """Never blocks."""
        return self._sums.ready()

    def verify(self) -> None:
        """Raises WorkerFailedError that names the ranks which differ and the first bad row."""
        problem = compare(self._sums.wait())
        if problem is not None:
            ranks, row = problem
            raise WorkerFailedError(
                f"The batch state differs between ranks after step {self._step}: rank "
                f"{', '.join(map(str, ranks))} from the majority, first in row {row}. This is a "
                "bug of tp_runtime; please report it with this message."
            )


def compare(sums: Tensor) -> tuple[list[int], int] | None:
    """`sums` [ranks, rows] int64. None when all ranks agree; else (ranks that differ from the most
    common value of the first bad row, that row). With two ranks rank 0 counts as right."""
    bad_rows = (sums != sums[0]).any(0).nonzero()
    if not len(bad_rows):
        return None
    row = int(bad_rows[0])
    column = sums[:, row].tolist()
    usual = max(dict.fromkeys(column), key=column.count)
    return [rank for rank, value in enumerate(column) if value != usual], row
