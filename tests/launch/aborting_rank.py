"""A null rank whose workers die whenever they are to record a graph.

python -m tests.launch.aborting_rank RUN_DIR OWNER_PID STEP_US
"""

from __future__ import annotations

import os

from tp_runtime.coordinator.null_worker import NullWorker
from tp_runtime.launch.bench import null_rank
from tp_runtime.messages import Answer, StepPlan


class _Aborting(NullWorker):
    def answer(self, plan: StepPlan) -> Answer:
        if plan.records_graph:
            os.abort()
        return super().answer(plan)


if __name__ == "__main__":
    null_rank.NullWorker = _Aborting  # type: ignore[misc]
    null_rank.main()
