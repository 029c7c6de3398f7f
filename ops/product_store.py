"""Files that keep which algorithm multiplies fastest, so that the next start need not time again.

One JSON file per weight shape, GPU and library: an algorithm is a record of 64 bytes that only the
library that made it can read, and what is fast on one GPU is not on another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from tp_runtime.ops.cublas_lt import ALGORITHM_BYTES

logger = logging.getLogger(__name__)

_FORMAT = 1
"""Raised when files written before are not to be used any more."""

Algorithm = Annotated[bytes, msgspec.Meta(min_length=ALGORITHM_BYTES, max_length=ALGORITHM_BYTES)]
Rows = Annotated[int, msgspec.Meta(ge=1)]
Algorithms = dict[int, bytes | None]
"""Rows -> algorithm, or None where what is done without one is as good."""


class ProductKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a choice holds for. `gpu`, `torch` and `dtype` as torch names them."""

    gpu: str
    torch: str
    cublas_lt: int
    dtype: str
    outputs: int
    inputs: int
    format: int = _FORMAT

    @property
    def file_name(self) -> str:
        parts = (self.gpu, self.torch, self.cublas_lt, self.dtype, self.outputs, self.inputs)
        return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "_".join(map(str, parts))) + ".json"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: ProductKey
    algorithms: dict[Rows, Algorithm | None]


class ProductStore:
    """`folder` is made when something is written; None: nothing is kept. No method raises for what
    is wrong with the folder or with a file."""

    def __init__(self, folder: Path | None, gpu: str, library_version: int) -> None:
        self.folder = folder
        self._gpu, self._version = gpu, library_version

    def key(self, weight: torch.Tensor) -> ProductKey:
        """For a weight [outputs, inputs]."""
        outputs, inputs = weight.shape
        dtype = str(weight.dtype).removeprefix("torch.")
        return ProductKey(self._gpu, str(torch.__version__), self._version, dtype, outputs, inputs)

    def read(self, key: ProductKey) -> Algorithms:
        """Empty where nothing is kept, or what is kept is damaged or for something else."""
        if self.folder is None:
            return {}
        path = self.folder / key.file_name
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.info("%s is not used and will be written again: %s", path, error)
            return {}
        return file.algorithms if file.key == key else {}

    def add(self, key: ProductKey, found: Algorithms) -> None:
        """Keeps `found` beside what is kept already. Ranks may do so at the same time: readers see
        one whole file or another."""
        if self.folder is None:
            return
        content = msgspec.json.encode(_File(key, {**self.read(key), **found}))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / key.file_name, content)
        except OSError as error:
            logger.warning(
                "tp_runtime: Which matrix products are fast cannot be kept in %s (%s); the next "
                "start will time them again.",
                *(self.folder, error.strerror),
            )
            self.folder = None


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
