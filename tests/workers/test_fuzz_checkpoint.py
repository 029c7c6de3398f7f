"""Random and mutated safetensors files: tensors that fit, or one clear WeightsError."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tp_runtime.checkpoint_files import INDEX_FILE, SINGLE_FILE
from tp_runtime.errors import WeightsError
from tp_runtime.workers.checkpoint import Checkpoint

NUMBERS = st.integers(-2, 40) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, -(2**63)])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "F64", "I8", "", "X"]) | st.none(),
        "shape": st.lists(NUMBERS, max_size=4) | st.none() | NUMBERS,
        "data_offsets": st.lists(NUMBERS, min_size=0, max_size=3) | st.none(),
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def good(folder) -> bytes:
    path = folder / SINGLE_FILE
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


def with_header(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def read_all(folder: Path) -> None:
    """Every tensor has as many elements as its shape says, and can be read to the last byte; or
    there is an error of one kind."""
    message = f"{SINGLE_FILE} is good"
    try:
        checkpoint = Checkpoint(folder)
        for name in checkpoint:
            tensor = checkpoint[name]
            assert tensor.numel() == math.prod(tensor.shape)
            tensor.float().sum()
    except WeightsError as error:
        message = str(error)
    assert SINGLE_FILE in message
    assert len(message) < 4000


@settings(max_examples=300)
@given(entries=st.dictionaries(st.text(max_size=4), ENTRIES, max_size=3), size=st.integers(0, 64))
def test_any_header_gives_tensors_or_an_error(folder, entries: dict[str, Any], size: int):
    header = json.dumps(entries).encode()
    (folder / SINGLE_FILE).write_bytes(with_header(header, bytes(size)))
    read_all(folder)


@settings(max_examples=300)
@given(data=st.data())
def test_any_bytes_give_tensors_or_an_error(folder, good, data):
    at = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(max_size=8))
    cut = data.draw(st.booleans())
    (folder / SINGLE_FILE).write_bytes(
        good[:at] if cut else good[:at] + piece + good[at + len(piece) :]
    )
    read_all(folder)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(with_header(b"[" * 200_000, b""), id="deep"),
        pytest.param(with_header(b'{"a": ' + b"9" * 10_000 + b"}", b""), id="long number"),
        pytest.param(with_header(b"{}", b"", 99_999_999), id="a length that is not there"),
        pytest.param(with_header(b"{}", b"", 2**63), id="a huge length"),
        pytest.param(with_header(b'{"a": [1, 2]}', b""), id="an entry that is none"),
    ],
)
def test_what_json_itself_chokes_on_is_refused(tmp_path, content):
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(WeightsError, match=SINGLE_FILE) as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"a": "../../etc/passwd"}}',
        '{"weight_map": {"a": {"b": 1}}}',
        '{"weight_map": [1]}',
        "[" * 200_000,
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, index):
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(WeightsError):
        Checkpoint(tmp_path)
