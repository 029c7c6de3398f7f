"""What holds for all tests.

Fixtures: `gloo_pool(size)`, a pool of real gloo processes (tests.gloo_pool). Settings: no test
reaches a model hub or sees a server of the person who runs the tests; Triton kernels run in
Triton's interpreter where there is no GPU; tests marked `gpu` are skipped there.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

# Examples are drawn slowly on a machine that is busy with something else; that is no fault.
hypothesis_settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("tests")

pytest_plugins = ["tests.gloo_pool", "tests.seconds_per_folder"]

HAS_GPU = Path("/dev/nvidiactl").exists()
"""Told without importing torch, which most tests of the coordinator never need."""

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TP_RUNTIME_HTTP"] = "0"  # servers of tests side by side would want the same port
# A shell starts what it runs in the background with SIGINT ignored, and children inherit that; the
# tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: the tests beside this one want the other cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not HAS_GPU:
    # Read when a kernel is defined, so before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def own_runtime_folder() -> Iterator[None]:
    """Run files and sockets of the tests' servers lie apart from everybody else's.

    Not under pytest's own folder: the path of a unix socket may have 107 characters."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    folder = tempfile.mkdtemp(prefix="tpr_")
    os.environ["XDG_RUNTIME_DIR"] = folder
    yield
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, made once in the cache folder; skips where it cannot be had."""
    from tp_runtime.errors import TPRuntimeError
    from tp_runtime.launch.demo_model import demo_model_folder

    try:
        return demo_model_folder(lambda text: None)
    except (TPRuntimeError, OSError) as error:
        pytest.skip(f"the demo's model cannot be had here: {error}")


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test alone, so that no other test's servers are found."""
    with tempfile.TemporaryDirectory(prefix="tpr_") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


DEADLINES = tuple(
    f"tests/{name}/" for name in ("client", "coordinator", "faults", "http", "launch", "transport")
)
"""Folders whose tests start threads or servers and hold them to deadlines of a second or two. On a
machine that is busy with something else a deadline can pass; such a test gets two more tries, each
of which is reported, and must then hold."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tries_again = config.pluginmanager.hasplugin("rerunfailures")
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if tries_again and item.nodeid.startswith(DEADLINES):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))
