"""`session`: a script under torchrun; its body runs once, over as many workers as ranks."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.processes import ROOT, TORCHRUN, Program, program
from tests.tiny_models import make_tiny
from tp_runtime.errors import ConfigError
from tp_runtime.launch import session
from tp_runtime.run_folder import ProcessId

SCRIPT = """
import os, sys, threading, time
import tp_runtime
from tp_runtime.launch import session

# What a user's script may have done before: a thread, and a library with threads of its own.
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print(f"before {os.environ.get('RANK')}", flush=True)
with session(sys.argv[1], device="cpu", max_model_len=256, num_kv_blocks=64) as client:
    print("body", client.info().tensor_parallel_size, flush=True)
    output = client.generate("Hello", temperature=0.0, max_tokens=6, ignore_eos=True)
    print("tokens", len(output.token_ids), flush=True)
    if sys.argv[2] == "stay":
        time.sleep(1000)
    if sys.argv[2] == "raise":
        raise RuntimeError("planted")
print("after", flush=True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def script(tmp_path, tiny):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return lambda mode, *launcher: program(tmp_path / "out", *launcher, str(path), tiny, mode)


def wait_and_count_workers(running: Program, seconds: float = 150) -> int:
    """Worker processes over the whole life of the program."""
    times_seen: Counter[ProcessId] = Counter()
    deadline = time.monotonic() + seconds
    while running.process.poll() is None and time.monotonic() < deadline:
        running.watch()
        times_seen.update(running.workers())
        time.sleep(0.02)
    assert running.wait(0) == 0, running.text()
    # A process that is about to start another program looks like a worker for an instant.
    return sum(times > 2 for times in times_seen.values())


def test_the_body_runs_once_and_its_exception_ends_all_ranks(script):
    with script("raise", *TORCHRUN) as running:
        assert running.wait(90) != 0
        lines = running.lines()
        assert {"before 0", "before 1"} < set(lines)
        assert [lines.count(line) for line in ("body 2", "tokens 6", "after")] == [1, 1, 0]
        assert "RuntimeError: planted" in running.text()
        running.assert_all_gone(0.5)


def test_kill_minus_nine_of_torchrun_leaves_nothing_after_two_seconds(script):
    with script("stay", *TORCHRUN) as running:
        running.wait_for("tokens 6", 90)
        running.signal(signal.SIGKILL)
        running.assert_all_gone(2.0)


def test_without_torchrun_the_script_runs_as_with_llm(script):
    with script("end", sys.executable) as running:
        assert running.wait(90) == 0
        assert running.lines() == ["before None", "body 1", "tokens 6", "after"]
        running.assert_all_gone(0.5)


def test_a_size_that_contradicts_torchrun_is_refused(monkeypatch, tiny):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="2 ranks"), session(tiny, tensor_parallel_size=4):
        pass


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("offline_generation", "'The capital of France is' ->"),
        ("streaming_client", "tokens/s"),
        ("compare_logits_with_transformers", "The runtime and transformers agree."),
        pytest.param("several_clients", "4 clients got", marks=pytest.mark.slow),
        pytest.param("batch_file", "3 requests, 1 of them could not run", marks=pytest.mark.slow),
        pytest.param("custom_sampling", "gives the same three again: True", marks=pytest.mark.slow),
        pytest.param("logprobs", "least expected was", marks=pytest.mark.slow),
    ],
)
def test_each_example_runs_with_its_torchrun_line_on_two_workers(name, shown, tiny, tmp_path):
    path = Path("torchrun_examples", f"{name}.py")
    line = f"torchrun --nproc-per-node=2 {path} [MODEL]"
    assert line in (ROOT / path).read_text()
    with program(tmp_path / "out", *TORCHRUN, str(ROOT / path), tiny) as running:
        assert wait_and_count_workers(running) == 2
        assert shown in running.text()
        running.assert_all_gone(0.5)
