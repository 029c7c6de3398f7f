"""Every file, class and test that the README names exists, so that its tables can be trusted."""

from __future__ import annotations

import ast
import re

import pytest

from tests.import_scan import ROOT

_TEST_NAME = re.compile(r"`(tests/[\w/.-]+\.py)::(\w+)`")
_PATH = re.compile(r"`((?:tp_runtime|ops|workers|launch|tests|torchrun_examples|docs)/[\w/.-]+)`")


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_page_names_only_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = {found.rstrip("/") for found in _PATH.findall(text)}
    assert paths, "the page names no file at all: the pattern or the page is broken"
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_readme_names_only_tests_that_exist() -> None:
    named = _TEST_NAME.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert named
    missing = []
    for file, test in named:
        path = ROOT / file
        functions = set()
        if path.is_file():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        if test not in functions:
            missing.append(f"{file}::{test}")
    assert missing == []


def test_readme_classes_exist_in_the_file_beside_them() -> None:
    """Rows of the tables read: what | `file`: `Name`, `Name` | test."""
    missing = []
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        kinds = ast.ClassDef | ast.FunctionDef | ast.AnnAssign | ast.Assign
        defined = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, kinds):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        missing += [f"{file}: {n}" for n in re.findall(r"`(\w+)`", names) if n not in defined]
    assert missing == []
