"""A model is a folder or a hub name; what is neither, or cannot be had, is told in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny
from tp_runtime.errors import ConfigError
from tp_runtime.model_folder import resolve_model_folder


def refusal(model: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model_folder(model)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_folder(str(tmp_path)) == tmp_path.resolve()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model_folder("owner/name") == (tmp_path / "owner" / "name").resolve()


@pytest.mark.parametrize("model", ["nowhere", "/nowhere/at/all", "./a/b", "a/b/c", "", "~/no/no"])
def test_what_is_no_folder_and_no_hub_name_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"There is no folder {model!r}" in refusal(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file" in refusal(str(file))


def test_without_connection_the_name_and_the_way_out_are_given() -> None:
    """The tests run with HF_HUB_OFFLINE=1, so nothing is looked up."""
    message = refusal("some-owner/some-model")
    assert "'some-owner/some-model'" in message
    assert "cannot be reached" in message
    assert "give its folder" in message


def _fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> list[bool]:
    """Replaces the download; records whether each call was for the local cache only."""
    import huggingface_hub

    calls: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        return str(download(name, local_files_only))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_complete_model_in_the_cache_needs_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path)
    calls = _fake_hub(monkeypatch, lambda name, local: folder)
    assert resolve_model_folder("owner/name") == folder
    assert calls == [True]


def test_a_download_that_was_cut_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has the index and one of the files it names."""
    partial = make_tiny("llama", tmp_path / "partial", shards=2)
    (partial / "model-00002-of-00002.safetensors").unlink()
    whole = make_tiny("llama", tmp_path / "whole", shards=2)
    calls = _fake_hub(monkeypatch, lambda name, local: partial if local else whole)
    assert resolve_model_folder("owner/name") == whole
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [("GatedRepoError", "is gated"), ("RepositoryNotFoundError", "no model of that name")],
)
def test_answers_of_the_hub_become_sentences(
    error: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from huggingface_hub import errors

    def download(name: str, local: bool) -> Path:
        if local:
            raise errors.LocalEntryNotFoundError("not cached")
        response = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))
        raise getattr(errors, error)("long text\nwith lines", response=response)

    _fake_hub(monkeypatch, download)
    assert wanted in refusal("owner/name")


def test_looking_up_a_model_loads_neither_torch_nor_transformers() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from tp_runtime.errors import ConfigError\n"
        "from tp_runtime.model_folder import resolve_model_folder\n"
        "try:\n    resolve_model_folder('some-owner/some-model')\n"
        "except ConfigError:\n    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
