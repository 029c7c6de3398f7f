"""Recording and checking graphs by vote: what one rank cannot do, none does."""

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
        cause = error.__context__ or error  # what ended a recording, rather than that it ended
        wrong = f"{type(cause).__name__}: {cause}"
    if group.size == 1:
        return wrong
    ballot = torch.full((1,), int(not wrong), device=device)
    if int(group.comm.all_reduce(ballot)) == group.size:
        return ""
    return wrong or "another rank found a fault"


def with_memory(record: Callable[[], None], group: TPGroup, device: torch.device) -> str:
    """Collective. As `attempt`, for the recording of a graph: nobody begins where one has no
    memory for it."""

    def look() -> str:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else SPARE_BYTES
        return "" if free >= SPARE_BYTES else f"only {free >> 20} MiB of device memory are free"

    def do() -> str:
        record()
        return ""

    return attempt(look, group, device) or attempt(do, group, device)
