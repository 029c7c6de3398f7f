"""Choices that are kept: read as written, and nothing wrong with a file is ever an error."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from tests.ops.fake_products import named
from tp_runtime.ops.product_store import ProductKey, ProductStore

WEIGHT = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
FOUND = {48: named("a"), 64: None, 2048: named("b")}


def store_in(folder: Path | None, gpu: str = "NVIDIA H200", version: int = 130200) -> ProductStore:
    return ProductStore(folder, gpu, version)


def test_what_is_written_is_read_by_the_next_start(tmp_path: Path) -> None:
    store = store_in(tmp_path / "products")
    store.add(store.key(WEIGHT), FOUND)
    again = store_in(tmp_path / "products")
    assert again.read(again.key(WEIGHT)) == FOUND
    (file,) = (tmp_path / "products").iterdir()
    assert file.name.startswith("NVIDIA-H200_")
    assert file.name.endswith("_130200_bfloat16_4096_1024.json")


def test_further_choices_stand_beside_those_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    key = store.key(WEIGHT)
    store.add(key, FOUND)
    store.add(key, {96: named("c"), 64: named("d")})
    assert store.read(key) == {**FOUND, 96: named("c"), 64: named("d")}


def test_other_gpu_library_dtype_or_shape_is_another_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(store.key(WEIGHT), FOUND)
    for other, weight in (
        (store_in(tmp_path, gpu="NVIDIA H100"), WEIGHT),
        (store_in(tmp_path, version=130300), WEIGHT),
        (store, WEIGHT.half()),
        (store, WEIGHT.t()),
    ):
        assert other.read(other.key(weight)) == {}


def test_a_file_for_something_else_under_this_name_is_not_used(tmp_path: Path) -> None:
    """Copied by hand, or of a GPU whose name differs in a character that a file name lacks."""
    store = store_in(tmp_path)
    key = store.key(WEIGHT)
    store.add(key, FOUND)
    path = tmp_path / key.file_name
    other = msgspec.structs.replace(key, torch="1.0")
    path.write_bytes(path.read_bytes().replace(key.torch.encode(), other.torch.encode()))
    assert store.read(key) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"key": 1}',
        b'{"key": {}, "algorithms": {}}',
        '{"key": KEY, "algorithms": {"48": "AAAA"}}',
        '{"key": KEY, "algorithms": {"many": null}}',
        '{"key": KEY, "algorithms": {"0": null}}',
        '{"key": KEY, "algorithms": {"48": null}',
    ],
)
def test_a_damaged_file_is_ignored_and_written_again(tmp_path: Path, content: bytes | str) -> None:
    store = store_in(tmp_path)
    key = store.key(WEIGHT)
    if isinstance(content, str):
        content = content.replace("KEY", msgspec.json.encode(key).decode()).encode()
    (tmp_path / key.file_name).write_bytes(content)
    assert store.read(key) == {}
    store.add(key, FOUND)
    assert store.read(key) == FOUND


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    stores = [store_in(tmp_path / "made" / "by whoever is first") for _ in range(8)]
    key, wrong = stores[0].key(WEIGHT), []

    def work(store: ProductStore) -> None:
        for _ in range(20):
            store.add(key, FOUND)
            if store.read(key) != FOUND:
                wrong.append(store.read(key))

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [path.name for path in stores[0].folder.iterdir()] == [key.file_name]


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = store_in(tmp_path / "file" / "products")
    for _ in range(3):
        store.add(store.key(WEIGHT), FOUND)
    assert store.read(store.key(WEIGHT)) == {}
    (record,) = caplog.records
    assert "cannot be kept" in record.message


def test_a_read_only_folder_is_read_and_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    key = store.key(WEIGHT)
    store.add(key, FOUND)

    def refuse(**where: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    store.add(key, {96: None})
    assert "Permission denied" in caplog.text
    assert store_in(tmp_path).read(key) == FOUND


def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    key = store.key(WEIGHT)
    store.add(key, FOUND)

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    store.add(key, {96: None})
    assert "No space left" in caplog.text
    assert store_in(tmp_path).read(key) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == [key.file_name]


def test_without_a_folder_nothing_is_kept() -> None:
    store = store_in(None)
    store.add(store.key(WEIGHT), FOUND)
    assert store.read(store.key(WEIGHT)) == {}


def test_a_file_name_holds_nothing_that_a_folder_could_not() -> None:
    key = ProductKey("../GPU\n/ x", "2.11.0+cu130", 1, "bfloat16", 2, 3)
    assert key.file_name == "..-GPU-x_2.11.0+cu130_1_bfloat16_2_3.json"
