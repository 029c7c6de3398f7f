"""What cannot work is refused with one sentence, quickly, before any process starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny
from tp_runtime.launch import exit_status, gpus
from tp_runtime.launch.cli import run
from tp_runtime.run_folder import run_root

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy of the tiny model to be spoiled."""
    return Path(shutil.copytree(tiny, tmp_path / "broken"))


def refusal(capfd, *arguments: str) -> str:
    started = time.monotonic()
    assert run(list(arguments)) == exit_status.REFUSED
    assert time.monotonic() - started < 2
    captured = capfd.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("tp_runtime: ")
    assert not list(run_root().iterdir())
    return lines[0]


def one_visible_gpu(monkeypatch, mask: str | None = None) -> None:
    monkeypatch.setattr(gpus, "_ask_nvml", lambda: ("GPU-a",) if mask is None else ("GPU-a",) * 4)
    if mask is None:
        monkeypatch.delenv(gpus.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VARIABLE, mask)


def test_two_ranks_with_one_visible_gpu(tiny, monkeypatch, capfd):
    one_visible_gpu(monkeypatch, mask="3")
    sentence = refusal(capfd, "serve", str(tiny), "-tp", "2")
    for part in ("2 GPUs were asked", "1 can be seen of 4", "CUDA_VISIBLE_DEVICES is '3'"):
        assert part in sentence


def test_cuda_without_any_gpu(tiny, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "_ask_nvml", lambda: ())
    sentence = refusal(capfd, "serve", str(tiny), "--device", "cuda")
    assert "0 can be seen of 0" in sentence
    assert "--device cpu" in sentence


def test_a_refusal_loads_neither_torch_nor_transformers(tiny):
    """In a process of its own: here torch is loaded already."""
    code = (
        "import sys, time; started = time.monotonic(); "
        "from tp_runtime.launch import cli, gpus; "
        "gpus._ask_nvml = lambda: ('GPU-a',); "
        f"status = cli.run(['serve', {str(tiny)!r}, '-tp', '2']); "
        "print(status, 'torch' in sys.modules, 'transformers' in sys.modules, "
        "time.monotonic() - started < 2)"
    )
    environment = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(run_root().parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["2", "False", "False", "True"], done.stderr


def test_no_such_folder(capfd):
    assert "/no/such/folder" in refusal(capfd, "serve", "/no/such/folder")


def test_no_config(broken, capfd):
    (broken / "config.json").unlink()
    assert "config.json" in refusal(capfd, "serve", str(broken))


def test_an_unknown_architecture_lists_the_known_ones(broken, capfd):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["Gpt9"]}))
    sentence = refusal(capfd, "serve", str(broken))
    assert "Gpt9" in sentence
    assert "Qwen3ForCausalLM" in sentence


def test_missing_weights(broken, capfd):
    (broken / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(capfd, "serve", str(broken))


def test_truncated_weights(broken, capfd):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cut short" in refusal(capfd, "serve", str(broken))


def test_more_ranks_than_query_heads(tiny, capfd):
    sentence = refusal(capfd, "serve", str(tiny), "-tp", "5", "--device", "cpu")
    assert "5" in sentence
    assert "4 query heads" in sentence


def test_longer_than_the_model(tiny, capfd):
    assert "512" in refusal(capfd, "serve", str(tiny), "--max-model-len", "1000000")


def test_no_model_unknown_flag_unknown_command(tiny, capfd):
    assert "No model" in refusal(capfd, "serve")
    assert "--tensor-paralel-size" in refusal(capfd, "serve", str(tiny), "--tensor-paralel-size=2")
    assert "srve" in refusal(capfd, "srve")


def test_the_torchrun_entry_without_torchrun_says_how_to_start(tiny):
    command = [sys.executable, "-m", "tp_runtime.launch.serve", str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == exit_status.REFUSED
    assert "torchrun --nproc-per-node=2" in done.stderr
    assert len(done.stderr.splitlines()) == 1
