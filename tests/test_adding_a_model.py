"""docs/adding-a-model.md works when it is followed word for word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-a-model.md"


def _insert(file: Path, before: str, text: str) -> None:
    content = file.read_text(encoding="utf-8")
    assert content.count(before) == 1, f"{file} has changed; so must {PAGE.name}"
    file.write_text(content.replace(before, f"{text}{before}"), encoding="utf-8")


@pytest.mark.timeout(400)
def test_following_the_page_adds_a_model_that_equals_transformers(tmp_path: Path) -> None:
    """A copy of the checkout, the four edits of the page, the command of the page."""
    for folder in ("tp_runtime", "ops", "workers", "launch", "tests"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    blocks = re.findall(r"```(?:python|bash)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    entry, model, tiny, parity, command = blocks
    _insert(tmp_path / "tp_runtime/architectures.py", ")\n\nARCHITECTURES", entry)
    (tmp_path / "workers/models/granite.py").write_text(model, encoding="utf-8")
    _insert(tmp_path / "tests/tiny_models.py", "}\nKINDS", tiny)
    _insert(
        tmp_path / "tests/workers/test_parity.py", '}\n\n\n@pytest.fixture(scope="session")', parity
    )
    program, *arguments = command.split()
    assert program == "pytest"
    # Three and four ranks only repeat what the other models show there.
    arguments[-1] += " and not -3 and not -4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
