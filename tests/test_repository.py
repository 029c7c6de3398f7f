"""Promises of the repository itself: packages, requirements, the wheel, file names and sizes."""

from __future__ import annotations

import ast
import configparser
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.import_scan import MAPPED_FOLDERS, ROOT, imports, module_name, source_files

PACKAGED = ("tp_runtime", *MAPPED_FOLDERS)
DISTRIBUTION_OF = {
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn",  # FlashAttention-3, built by hand; optional too
    "huggingface_hub": "huggingface-hub",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "zmq": "pyzmq",
}
MOST_LINES = 400
"""Style: a file stays near 300 lines; past 400 it is two nouns."""
ONE_NOUN_WHATEVER_ITS_LENGTH = {"tp_runtime/messages.py"}
"""Style asks for all message types in one file."""


def _setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _requirements(text: str) -> list[Requirement]:
    return [Requirement(line) for line in _lines(text) if not line.startswith("#")]


def _all_sources() -> list[Path]:
    return [path for folder in PACKAGED for path in source_files(folder)]


def test_symlinks_into_tp_runtime_are_committed_as_symlinks() -> None:
    for name in MAPPED_FOLDERS:
        link = ROOT / "tp_runtime" / name
        assert link.is_symlink(), f"{link} is not a symlink"
        assert os.readlink(link) == f"../{name}"


def test_setup_cfg_lists_every_package() -> None:
    found = {module_name(path) for path in _all_sources() if path.name == "__init__.py"}
    assert found == set(_lines(_setup_cfg()["options"]["packages"]))


def test_every_source_lies_in_a_package_with_a_docstring() -> None:
    for folder in {path.parent for path in _all_sources()}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder} has no __init__.py, so the wheel would leave it out"
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), f"{init}: docstring"


def test_imported_packages_are_requirements() -> None:
    options = _setup_cfg()["options"]
    extras = _setup_cfg()["options.extras_require"]
    texts = [options["install_requires"], extras["flash-attn"]]
    declared = {wanted.name.lower() for text in texts for wanted in _requirements(text)}
    used: dict[str, str] = {}
    for path in _all_sources():
        for found in imports(path):
            top = found.name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "tp_runtime":
                used.setdefault(DISTRIBUTION_OF.get(top, top), f"{path}:{found.line}")
    assert {name: at for name, at in used.items() if name not in declared} == {}


def test_constraints_lie_inside_the_supported_ranges() -> None:
    """`make` installs what constraints.txt pins; pip would refuse a pin outside setup.cfg."""
    parser = _setup_cfg()
    texts = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    supported = {wanted.name: wanted for text in texts for wanted in _requirements(text)}
    pins = _requirements((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert {"torch", "triton", "transformers"} <= {pin.name for pin in pins}
    for pin in pins:
        assert pin.name in supported, f"{pin} is pinned and asked for by nothing in setup.cfg"
        for part in pin.specifier:
            if part.operator == "==":
                assert supported[pin.name].specifier.contains(part.version), pin


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in the wheel, built from a copy so that no build output is left in the checkout."""
    copy = tmp_path_factory.mktemp("wheel") / "source"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    built = copy.parent / "built"
    done = subprocess.run(
        [*command, "-w", str(built), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_tp_runtime_only(wheel_files: list[str]) -> None:
    """Top-level `ops` or `launch` would overwrite other people's packages."""
    tops = {name.partition("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tp_runtime"}


def test_wheel_holds_every_module_once(wheel_files: list[str]) -> None:
    wanted = {
        module_name(path).replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
        for path in _all_sources()
    }
    modules = [name for name in wheel_files if name.endswith(".py")]
    assert len(modules) == len(set(modules))
    assert set(modules) == wanted
    assert "tp_runtime/py.typed" in wheel_files


def test_wheel_holds_the_licence(wheel_files: list[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_file_is_two_nouns() -> None:
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _all_sources()
    }
    long = {name: lines for name, lines in sizes.items() if lines > MOST_LINES}
    assert long.keys() - ONE_NOUN_WHATEVER_ITS_LENGTH == set(), long


def test_no_file_is_named_after_nothing() -> None:
    names = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "misc.py"}
    sources = [*_all_sources(), *source_files("tests"), *source_files("torchrun_examples")]
    assert [str(path) for path in sources if path.name in names] == []


def test_markers_are_declared_and_strict() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pytest_settings = settings["tool"]["pytest"]["ini_options"]
    assert "--strict-markers" in pytest_settings["addopts"]
    assert {line.partition(":")[0] for line in pytest_settings["markers"]} == {
        "gpu",
        "slow",
        "faults",
    }
