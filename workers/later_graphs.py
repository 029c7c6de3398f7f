"""Graphs that are recorded when the worker serves already, one at a time, as plans ask for them.

Until then steps run with a larger graph, or eagerly. The one that most steps would have taken comes
first. All ranks hold the same list, have run the same steps, take from it in step with each other,
and leave a graph out together when one of them has no memory for it, or its capture fails (see
`workers.graph_votes`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.graph_votes import with_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LaterGraph:
    """`record` makes the graph, which nothing uses before that; after `forget` nothing does.
    `missed`: how many steps would have taken it."""

    record: Callable[[], None]
    forget: Callable[[], object]
    missed: Callable[[], int]


class LaterGraphs:
    """`todo` is the same on every rank."""

    def __init__(self, group: TPGroup, device: torch.device, todo: Iterable[LaterGraph]) -> None:
        self._group, self._device = group, device
        self._todo = list(todo)
        self._told = False

    def __len__(self) -> int:
        return len(self._todo)

    def record_next(self) -> None:
        """Collective; nothing when none is left."""
        if not self._todo:
            return
        graph = max(self._todo, key=lambda graph: graph.missed())  # the first of several
        self._todo.remove(graph)
        wrong = with_memory(graph.record, self._group, self._device)
        if wrong:
            graph.forget()
        if wrong and not self._told and self._group.rank == 0:
            self._told = True
            logger.warning("tp_runtime: Some steps run without a graph of their size: %s.", wrong)
