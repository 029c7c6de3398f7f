"""The tensors of a checkpoint, mapped into memory: nothing is read until a layer takes its range.

A file is mapped once; a tensor is a view into the mapping, so that a rank's range is copied
straight from the page cache into the parameter, converted on the way. Which files there are, and
their headers, come from `tp_runtime.checkpoint_files`. Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tp_runtime.checkpoint_files import INDEX_FILE, find_checkpoint, read_header
from tp_runtime.errors import WeightsError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Formats that are plain numbers; anything else is a quantised checkpoint."""


class _MappedFile:
    """One safetensors file; private mapping, never written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        assert isinstance(storage, torch.UntypedStorage)  # torch's stubs name a base class
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)

    def tensor(self, name: str) -> Tensor:
        """A view of the whole tensor. Raises WeightsError naming file and tensor."""
        entry = self.header.tensors[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightsError(
                f"{name} in {self.path} is stored as {entry.dtype}; quantised checkpoints are "
                f"not implemented, only {', '.join(_DTYPES)} are read."
            )
        shape = entry.shape
        first, last = (self.header.data_start + offset for offset in entry.data_offsets)
        raw = self._bytes[first:last]
        if last - first != math.prod(shape) * dtype.itemsize:
            raise WeightsError(
                f"{name} in {self.path} has shape {shape} and {last - first} bytes, which do not "
                "fit together; download the file again."
            )
        if first % dtype.itemsize:
            raw = raw.clone()  # an old writer did not align its data
        return raw.view(dtype).view(shape)


class Checkpoint:
    """All tensors of a model folder by name. Raises WeightsError for what is wrong with files."""

    def __init__(self, folder: Path) -> None:
        found = find_checkpoint(folder)
        self.folder = folder
        self._files: dict[str, _MappedFile] = {}
        for path in found.files:
            file = _MappedFile(path)
            for name in file.header.tensors:
                if name in self._files:
                    first = self._files[name].path.name
                    raise WeightsError(
                        f"{name} is twice in {folder}, in {first} and in {path.name}; remove the "
                        "file that does not belong to the model."
                    )
                self._files[name] = file
        for name, file_name in found.weight_map.items():
            if name not in self._files or self._files[name].path.name != file_name:
                raise WeightsError(
                    f"{name} is not in {folder / file_name}, where {INDEX_FILE} says it is; "
                    "download the files again."
                )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        """Names in the order in which they lie in the files, so that disks read forward."""
        for file in dict.fromkeys(self._files.values()):
            tensors = file.header.tensors
            yield from sorted(tensors, key=lambda name: tensors[name].data_offsets[0])

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor as a view into its file."""
        return self._files[name].tensor(name)

    def file_of(self, name: str) -> Path:
        return self._files[name].path
