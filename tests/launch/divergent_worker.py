"""Plants a divergence: on rank 1 the position of row 1 is wrong from its first decode step on.

Loaded into every process of a test's server through `sitecustomize` on PYTHONPATH; it waits for the
module that holds the batch state to be imported, and no shipped code knows of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

BAD_RANK, BAD_ROW = 1, 1
_RUNNER = "tp_runtime.workers.runner"


def _plant(runner: Any) -> None:
    original = runner.Runner.step

    def step(self: Any, plan: Any) -> Any:
        # Rows come when their requests do: this one may not be there in the first steps.
        steady = plan.num_rows > BAD_ROW and not plan.new_rows and not plan.chunks
        if steady and self.group.rank == BAD_RANK:
            self.state.position[BAD_ROW] += 1
        return original(self, plan)

    runner.Runner.step = step


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module and changes it once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _plant(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
