"""The pages in docs/ name files, classes and functions: all exist, and all pages are linked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.import_scan import ROOT

PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
TO_BE_WRITTEN = {"workers/models/granite.py"}
"""Files that a page tells its reader to make."""
_FOLDERS = "tp_runtime|ops|workers|launch|tests|torchrun_examples|docs|scripts"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w/.-]+)`")
_NAMED = re.compile(r"`([\w/]+\.py)`:\s+((?:`[\w.]+`(?:\s+\([^)`]*\))?(?:,\s+|\s+and\s+)?)+)")


def _text(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def names_in(path: Path) -> set[str]:
    """What a module defines at its top level, and `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            members = [
                m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found |= {f"{node.name}.{member.name}" for member in members}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def names_missing(text: str) -> list[str]:
    """Names written as `file.py`: `Name`, `Class.method` that the file does not define."""
    missing = []
    for file, listed in _NAMED.findall(text):
        defined = names_in(ROOT / file)
        missing += [f"{file}: {n}" for n in re.findall(r"`([\w.]+)`", listed) if n not in defined]
    return missing


def test_tests_that_are_named_exist() -> None:
    named = [found for page in PAGES for found in _TEST.findall(_text(page))]
    assert named
    paths = {file: ROOT / file for file, _ in named}
    defined = {file: names_in(path) if path.is_file() else set() for file, path in paths.items()}
    assert [f"{file}::{test}" for file, test in named if test not in defined[file]] == []


@pytest.mark.parametrize("page", PAGES)
def test_page_names_only_files_that_exist(page: str) -> None:
    paths = {found.rstrip("/") for found in _PATH.findall(_text(page))}
    paths |= {file for file, _ in _TEST.findall(_text(page))}
    assert [path for path in sorted(paths - TO_BE_WRITTEN) if not (ROOT / path).exists()] == []


def test_the_pages_name_many_files() -> None:
    """Or the pattern is broken and the test above sees nothing."""
    assert sum(len(set(_PATH.findall(_text(page)))) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES)
def test_functions_and_classes_stand_in_the_file_beside_them(page: str) -> None:
    assert names_missing(_text(page)) == []


def test_the_tour_names_many_functions_and_a_wrong_one_is_found() -> None:
    assert sum(names.count("`") // 2 for _, names in _NAMED.findall(_text("architecture.md"))) > 60
    wrong = "see `ops/norm.py`: `RMSNorm.forward` (fused), `RMSNorm.backward`"
    assert names_missing(wrong) == ["ops/norm.py: RMSNorm.backward"]


def test_every_page_is_linked_from_the_first() -> None:
    linked = set(re.findall(r"\]\((?:docs/)?([\w-]+\.md)\)", _text("README.md")))
    assert set(PAGES) - {"README.md"} <= linked
    for page in linked:
        assert (ROOT / "docs" / page).is_file()
