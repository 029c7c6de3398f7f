"""The import column of the folders' table (docs/README.md), and what `import tp_runtime` costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.import_scan import ROOT, imports, imports_of, source_files, within

HEAVY = ("torch", "transformers", "triton", "accelerate", "flash_attn", "flash_attn_interface")
FOR_WORKERS = (
    "tp_runtime.ops",
    "tp_runtime.workers",
    "tp_runtime.transport",
    "tp_runtime.messages",
    "tp_runtime.engine_config",
    "tp_runtime.model_config",
    "tp_runtime.model_length",
    "tp_runtime.cache_folder",
    "tp_runtime.checkpoint_files",
    "tp_runtime.sampling_params",
    "tp_runtime.errors",
)
"""What workers may import: layers, messages, transport, and what config and folders say."""


def _any(name: str, packages: tuple[str, ...]) -> bool:
    return any(within(name, package) for package in packages)


def library_may_import(name: str) -> bool:
    return not _any(name, (*HEAVY, "tp_runtime.ops", "tp_runtime.workers", "tp_runtime.launch"))


def ops_may_import(name: str) -> bool:
    return not within(name, "tp_runtime") or within(name, "tp_runtime.ops")


def workers_may_import(name: str) -> bool:
    if _any(name, ("transformers", "accelerate")):
        return False
    # `from tp_runtime import messages` is reported as tp_runtime and tp_runtime.messages.
    return not within(name, "tp_runtime") or name == "tp_runtime" or _any(name, FOR_WORKERS)


RULES: dict[str, Callable[[str], bool]] = {
    "tp_runtime": library_may_import,
    "ops": ops_may_import,
    "workers": workers_may_import,
}


def violations(path: Path, allowed: Callable[[str], bool]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"
        for found in imports(path)
        if not allowed(found.name)
    ]


@pytest.mark.parametrize("folder", RULES)
def test_folder_imports_only_what_it_may(folder: str) -> None:
    files = source_files(folder)
    assert files, f"no source files found in {folder}/"
    assert [line for path in files for line in violations(path, RULES[folder])] == []


@pytest.mark.parametrize("folder", ["tp_runtime", "ops", "workers", "launch", "torchrun_examples"])
def test_mapped_folders_are_imported_under_tp_runtime(folder: str) -> None:
    """`import ops` finds the folder in a checkout and somebody else's package once installed."""
    top = ("ops", "workers", "launch")
    bad = [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"
        for path in source_files(folder)
        for found in imports(path)
        if _any(found.name, top)
    ]
    assert bad == []


def test_only_the_files_of_the_communicators_use_torch_distributed() -> None:
    """Layers are given a TPGroup; none of them asks torch.distributed for its rank."""
    users = {
        str(path.relative_to(ROOT))
        for path in source_files("ops")
        if any(within(found.name, "torch.distributed") for found in imports(path))
    }
    assert users <= {"ops/group.py", "ops/symmetric.py"}


def test_scan_sees_imports_in_functions_relative_and_by_name() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch.nn\n"
        "def f():\n    from ..workers import loop\n    import importlib\n"
        "    return importlib.import_module('transformers.models')\n"
    )
    found = {item.name for item in imports_of(source, ROOT / "tp_runtime/text/imaginary.py")}
    assert {"torch.nn", "tp_runtime.workers", "tp_runtime.workers.loop"} <= found
    assert "transformers.models" in found


@pytest.mark.parametrize(
    ("rule", "name", "allowed"),
    [
        (library_may_import, "torch.cuda", False),
        (library_may_import, "torchvision", True),
        (library_may_import, "tp_runtime.launch.cli", False),
        (library_may_import, "tp_runtime.transport.ring", True),
        (ops_may_import, "tp_runtime.errors", False),
        (ops_may_import, "tp_runtime.ops.group", True),
        (workers_may_import, "tp_runtime.coordinator.scheduler", False),
        (workers_may_import, "tp_runtime.messages.StepPlan", True),
        (workers_may_import, "tp_runtime.text", False),
    ],
)
def test_rules_tell_allowed_from_forbidden(
    rule: Callable[[str], bool], name: str, allowed: bool
) -> None:
    assert rule(name) is allowed


_PROBE = """
import time; start = time.process_time()
import tp_runtime{more}
seconds = time.process_time() - start
import json, sys
heavy = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps([seconds, heavy]))
"""


def _import_cost(more: str) -> tuple[float, list[str]]:
    """CPU seconds of the import, best of 5 fresh processes, and the heavy modules it loaded. (Wall
    time is the same on a quiet machine and says nothing on a busy one.)"""
    best, loaded = float("inf"), set()
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", _PROBE.format(more=more, heavy=HEAVY)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        seconds, heavy = json.loads(out)
        best, loaded = min(best, seconds), loaded | set(heavy)
    return best, sorted(loaded)


@pytest.mark.parametrize("more", ["", "\nfrom tp_runtime import Client"], ids=["package", "Client"])
def test_import_is_quick_and_loads_neither_torch_nor_transformers(more: str) -> None:
    seconds, heavy = _import_cost(more)
    assert heavy == []
    assert seconds < 0.150
