"""Which modules a source file imports, read with `ast`, so that nothing is executed.

Imports inside functions, under TYPE_CHECKING and through `importlib.import_module("name")` count
as well: each is a dependency.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAPPED_FOLDERS = ("ops", "workers", "launch")
"""Folders at the top level that are imported under `tp_runtime`."""


class Import(NamedTuple):
    name: str
    line: int


def source_files(folder: str) -> list[Path]:
    """All Python files below a top-level folder, without the symlinks inside tp_runtime/."""
    top = ROOT / folder
    skipped = {top / name for name in MAPPED_FOLDERS}
    return [path for path in sorted(top.rglob("*.py")) if not skipped & set(path.parents)]


def module_name(path: Path) -> str:
    """`ops/linear.py` -> `tp_runtime.ops.linear`; a package's own name for its `__init__.py`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in MAPPED_FOLDERS:
        parts.insert(0, "tp_runtime")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[Import]:
    """Every imported module by its full name; `from a import b` gives both `a` and `a.b`."""
    return imports_of(path.read_text(encoding="utf-8"), path)


def imports_of(source: str, path: Path) -> list[Import]:
    """The imports of `source`, as if it stood at `path`."""
    package = module_name(path)
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    return list(_scan(ast.parse(source), package))


def _scan(tree: ast.Module, package: str) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            yield Import(base, node.lineno)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, node.lineno)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def within(name: str, package: str) -> bool:
    """Whether `name` is `package` or lies inside it."""
    return name == package or name.startswith(package + ".")
