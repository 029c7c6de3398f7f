"""The demo's model: right once converted, converted once, and clear when it cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.launch import demo_model
from tp_runtime.launch.demo_model import demo_model_folder


def _silent(_: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tp_runtime"


def _fake_conversion(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> list[Path]:
    """Replaces download and conversion by writing empty files; returns the list of calls."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path, target: Path, say: demo_model.Say) -> None:
        calls.append(target)
        time.sleep(seconds)
        folder.mkdir()
        for name in demo_model._COMPLETE:
            (folder / name).write_text("{}")

    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: Path(os.devnull))
    monkeypatch.setattr(demo_model, "_check_gguf", lambda path: None)
    monkeypatch.setattr(demo_model, "_convert_in_child", convert)
    return calls


def test_demo_model_is_a_llama_that_answers_as_its_makers_say() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model_folder(_silent)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    assert (model.dtype, model.generation_config.eos_token_id) == (torch.float32, 2)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=20)
    new = answer[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True) == "The capital of France is Paris."
    assert new[-1] == 2


def test_second_call_returns_the_folder_and_says_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_conversion(monkeypatch)
    said: list[str] = []
    first = demo_model_folder(said.append)
    assert first.parent == cache
    assert demo_model_folder(said.append) == first
    assert (len(calls), said) == (1, [])


def test_two_at_once_convert_once_and_the_second_says_it_waits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _fake_conversion(monkeypatch, seconds=0.3)
    said: list[str] = []
    folders: list[Path] = []

    def prepare() -> None:
        folders.append(demo_model_folder(said.append))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(folders) == 2
    assert len(calls) == 1
    assert ["Waiting" in line for line in said] == [True]


def test_leftovers_of_a_killed_conversion_are_removed_and_not_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_conversion(monkeypatch)
    left = cache / ".partial-old"
    left.mkdir(parents=True)
    half = cache / f"{demo_model.DEMO_MODEL_NAME}-v{demo_model._FOLDER_VERSION}"
    half.mkdir()
    (half / "config.json").write_text("half")
    folder = demo_model_folder(_silent)
    assert (folder / "config.json").read_text() == "{}"
    assert not left.exists()
    assert list(cache.glob(".partial-*")) == []


def test_damaged_download_is_named_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: damaged)
    with pytest.raises(ConfigError, match="is damaged"):
        demo_model_folder(_silent)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_failed_conversion_gives_its_last_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: Path("/nowhere/model.gguf"))
    monkeypatch.setattr(demo_model, "_check_gguf", lambda path: None)
    with pytest.raises(ConfigError, match=r"/nowhere/model\.gguf.*--model DIR"):
        demo_model_folder(_silent)


def test_cache_folder_that_cannot_be_made_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        demo_model_folder(_silent)


def test_preparing_the_model_loads_neither_torch_nor_transformers() -> None:
    probe = (
        "from tp_runtime.launch.demo_model import demo_model_folder; demo_model_folder()\n"
        "import sys; print([n for n in ('torch', 'transformers', 'gguf') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
