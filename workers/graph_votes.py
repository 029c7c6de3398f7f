"""Recording and checking graphs by vote: what one rank cannot do, none does.

A vote comes after a step, in which ranks wait for each other's parts of sums. So what it can settle
is what a rank finds before it begins, too little memory, or finds only in the end, a capture that
does not come about or a result that is wrong. A rank that fails in the middle of a sum leaves the
others waiting; the coordinator ends them then, and at last does without such graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tp_runtime.ops.group import TPGroup

SPARE_BYTES = 1 << 28
"""Of device memory, that must be free before a graph is recorded. A rank that ran out of it in the
middle of a recorded sum would leave the others waiting for its part."""


def attempt(step: Callable[[], str], group: TPGroup, device: torch.device) -> str:
    """Collective. "" when every rank has done `step`, which says what is wrong on this one or
    raises; otherwise what is wrong, or that another rank found something."""
    try:
        wrong = step()
    except Exception as error:  # of torch, of a package, of the driver: the eager way is there
        ended = error.__context__ is not None and "captur" in str(error)
        cause = error.__context__ if ended else error  # what ended a capture, not that it ended
        wrong = f"{type(cause).__name__}: {cause}"
    if group.all_say_yes(not wrong, device):
        return ""
    return wrong or "another rank found a fault"


def with_memory(record: Callable[[], None], group: TPGroup, device: torch.device) -> str:
    """Collective. As `attempt`, for the recording of a graph: nobody begins where one has no
    memory for it."""

    def look() -> str:
        free = _free_bytes(device)
        return "" if free >= SPARE_BYTES else f"only {free >> 20} MiB of device memory are free"

    def do() -> str:
        record()
        return ""

    return attempt(look, group, device) or attempt(do, group, device)


def _free_bytes(device: torch.device) -> int:
    """What the allocator keeps and does not use counts as free."""
    if device.type != "cuda":
        return SPARE_BYTES
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
