"""scripts/setup.sh says in one sentence what a machine lacks, and makes nothing before that."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.import_scan import ROOT


def _run_setup(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """scripts/setup.sh in an empty checkout, with `tmp_path/bin` first in the path."""
    checkout = tmp_path / "checkout"
    for name in ("scripts/setup.sh", "constraints.txt", "setup.cfg", "launch/demo_model.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "scripts/setup.sh"],
        cwd=checkout,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _fake_program(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_setup_on_another_system_says_in_one_sentence_what_is_needed(tmp_path: Path) -> None:
    _fake_program(tmp_path, "uname", "echo Darwin")
    done = _run_setup(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    for word in ("Linux", "Python 3.11", "Darwin"):
        assert word in sentence
    assert not (tmp_path / "checkout" / ".venv").exists()


def test_setup_with_an_old_python_names_what_is_needed(tmp_path: Path) -> None:
    _fake_program(tmp_path, "oldpython", "exit 1")
    done = _run_setup(tmp_path, PYTHON="oldpython")
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert "Python 3.11" in sentence


def test_setup_without_venv_module_names_the_package(tmp_path: Path) -> None:
    """Debian and Ubuntu ship Python without it."""
    _fake_program(tmp_path, "novenv", '[ "$1" = -m ] && exit 1; echo Python 3.11')
    done = _run_setup(tmp_path, PYTHON="novenv")
    assert done.returncode == 1
    assert "python3-venv" in done.stderr.splitlines()[-1]
