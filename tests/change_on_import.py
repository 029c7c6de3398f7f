"""Changing modules of the programs that a test starts: no shipped code knows of it.

For modules that `sitecustomize` loads into every process: what is changed is not imported for it,
but changed when the program itself imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def change_on_import(changes: dict[str, Callable[[Any], None]]) -> None:
    """Once a module of this name has been loaded, its function is called with it."""
    sys.meta_path.insert(0, _Finder(dict(changes)))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find these modules and changes them once they are loaded."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
