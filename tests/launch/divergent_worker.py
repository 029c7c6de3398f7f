"""Plants a divergence: on rank 1 the position of row 1 is wrong from its first decode step on.

Loaded into every process of a test's server through `sitecustomize` on PYTHONPATH; it waits for the
module that holds the batch state to be imported, and no shipped code knows of it.
"""

from __future__ import annotations

from typing import Any

from tests.change_on_import import change_on_import

BAD_RANK, BAD_ROW = 1, 1


def _plant(runner: Any) -> None:
    original = runner.Runner.step

    def step(self: Any, plan: Any) -> Any:
        # Rows come when their requests do: this one may not be there in the first steps.
        steady = plan.num_rows > BAD_ROW and not plan.new_rows and not plan.chunks
        if steady and self.group.rank == BAD_RANK:
            self.state.position[BAD_ROW] += 1
        return original(self, plan)

    runner.Runner.step = step


change_on_import({"tp_runtime.workers.runner": _plant})
