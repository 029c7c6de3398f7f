"""A rank whose batch state differs is named, with the first bad row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gloo_pool import GlooPool
from tp_runtime.errors import WorkerFailedError
from tp_runtime.messages import RowBlocks, StepPlan, pack_ids
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.state_check import StateCheck, compare

Pools = Callable[[int], GlooPool]


def check(group: TPGroup, bad_rank: int, what: str) -> str:
    state = BatchState(8, 4, 16, 100, torch.device("cpu"))
    blocks = [RowBlocks(r, 0, pack_ids([2 * r, 2 * r + 1])) for r in range(5)]
    state.apply(StepPlan(1, 1, 5, blocks=blocks))
    state.last_id[:5] = torch.arange(5)
    if group.rank == bad_rank:
        {"id": state.last_id, "position": state.position, "blocks": state.block_tables[:, 1]}[what][
            3
        ] += 1
    try:
        StateCheck(state, group, 17).verify()
    except WorkerFailedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["id", "position", "blocks"])
def test_a_planted_divergence_names_rank_and_row(gloo_pool: Pools, what: str) -> None:
    for message in gloo_pool(3).run(check, 1, what):
        assert "step 17" in message and "rank 1 " in message and "row 3" in message


def test_equal_states_pass(gloo_pool: Pools) -> None:
    assert gloo_pool(3).run(check, -1, "id") == ["", "", ""]


def test_swapped_blocks_are_seen() -> None:
    """A sum that ignores places would not see two blocks that changed places."""
    a, b = (BatchState(2, 4, 16, 100, torch.device("cpu")) for _ in range(2))
    a.apply(StepPlan(1, 1, 1, blocks=[RowBlocks(0, 0, pack_ids([4, 9]))]))
    b.apply(StepPlan(1, 1, 1, blocks=[RowBlocks(0, 0, pack_ids([9, 4]))]))
    assert compare(torch.stack([a.checksum(), b.checksum()])) == ([1], 0)
