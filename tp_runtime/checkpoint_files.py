"""Which files hold the weights of a model folder, and the header of a safetensors file.

Knows the layout on disk only (one file, or several and an index); no torch, no tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tp_runtime.config_reader import read_json_object
from tp_runtime.errors import ConfigError, WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


@dataclass(frozen=True)
class CheckpointFiles:
    """`files` in reading order; `weight_map` (tensor name -> file name) where there is an index."""

    files: tuple[Path, ...]
    weight_map: Mapping[str, str] = field(default_factory=dict)


def find_checkpoint(folder: Path) -> CheckpointFiles:
    """The safetensors files of a model folder, in transformers' order of preference.

    Raises WeightsError, one sentence: no weights, weights in another format, a file that the index
    names and that is not there."""
    if (folder / SINGLE_FILE).is_file():
        return CheckpointFiles((folder / SINGLE_FILE,))
    if (folder / INDEX_FILE).is_file():
        return _indexed(folder)
    found = sorted(folder.glob("model*.safetensors"))
    if found:
        return CheckpointFiles(tuple(found))
    for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf"):
        other = sorted(folder.glob(pattern))
        if other:
            raise WeightsError(
                f"{folder} holds its weights as {other[0].name} and not as safetensors; convert "
                "them (transformers: save_pretrained) or get the model in safetensors format."
            )
    raise WeightsError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _indexed(folder: Path) -> CheckpointFiles:
    index = folder / INDEX_FILE
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ConfigError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index} has no weight_map; download the file again.")
    names = sorted(set(map(str, weight_map.values())))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(
            f"{folder} lacks {', '.join(missing[:3])}{' and others' if missing[3:] else ''} "
            f"({len(missing)} of the {len(names)} files in {INDEX_FILE}); download the rest."
        )
    return CheckpointFiles(tuple(folder / name for name in names), weight_map)


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file; offsets count from the end of the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], int]


@dataclass(frozen=True)
class Header:
    """`tensors` in the order of the file; their data begin at byte `data_start`."""

    tensors: Mapping[str, TensorEntry]
    data_start: int


def read_header(path: Path) -> Header:
    """The header of one safetensors file.

    Format: 8 bytes little-endian length, that many bytes of JSON, then the data. Raises
    WeightsError naming the file when it is cut short or not a safetensors file at all."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 2 <= length <= _MAX_HEADER else b""
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}.") from error
    if not text and 8 + length > size > 8:
        raise WeightsError(f"{path} is not a safetensors file; download it again.")
    if len(text) < length or size < 10:
        raise WeightsError(f"{path} is cut short (in its header); download it again.")
    try:
        tensors = _decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's and json's errors are ValueErrors
        raise WeightsError(
            f"{path} is not a good safetensors file ({error}); download it again."
        ) from error
    needed = 8 + length + max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if size < needed:
        raise WeightsError(f"{path} is cut short: {size} bytes of {needed}; download it again.")
    return Header(tensors, 8 + length)


def _decode(text: bytes) -> dict[str, TensorEntry]:
    entries = json.loads(text, object_pairs_hook=_no_duplicates)
    if not isinstance(entries, dict):
        raise ValueError("its header is not an object")
    entries.pop("__metadata__", None)
    tensors = msgspec.convert(entries, dict[str, TensorEntry])
    for name, entry in tensors.items():
        first, last = entry.data_offsets
        if first > last:
            raise ValueError(f"{name!r} ends before it begins")
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice")
        found[key] = value
    return found
