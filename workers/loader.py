"""Fills a model's parameters from a checkpoint, and proves that nothing was left out.

Each rank reads only its range of every tensor. Missing, unexpected, duplicate and wrongly shaped
tensors are errors that name the tensor; so is a parameter that nothing filled. Names follow the
model's modules, through `packed_modules_mapping` where several tensors share a parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

import tp_runtime
import tp_runtime.ops
import tp_runtime.workers
from tp_runtime.errors import WeightsError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.parameter import ShardId
from tp_runtime.ops.staging import release_staging
from tp_runtime.ops.tensor_source import TensorSource
from tp_runtime.workers.checkpoint import Checkpoint
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.random_source import RandomSource

logger = logging.getLogger(__name__)

_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|(cos|sin)_cached)$")
"""Tables that old versions of transformers saved; we compute them."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PROGRESS_EVERY_S = 0.5
_SHOWN = 4
"""Tensor names in one error."""

Progress = Callable[[str], None]


class ParallelLayer(Protocol):
    """What every layer of `tp_runtime.ops` with parameters offers."""

    @property
    def shard_ids(self) -> tuple[ShardId, ...]: ...

    def full_shape(self, name: str, shard_id: ShardId = None) -> tuple[int, ...]: ...

    def load_weight(self, name: str, source: TensorSource, shard_id: ShardId = None) -> int: ...


class Part(NamedTuple):
    """Where one tensor of the checkpoint belongs."""

    layer: ParallelLayer
    parameter: str
    shard_id: ShardId
    shape: tuple[int, ...]


def expected_parts(model: CausalLM) -> dict[str, Part]:
    """Checkpoint name -> place, for every tensor the model needs; a tied head is not among them.

    Raises WeightsError for a parameter whose module has no `load_weight`."""
    original: dict[tuple[str, ShardId], str] = {
        (ours, shard_id): theirs
        for theirs, (ours, shard_id) in model.packed_modules_mapping.items()
    }
    parts: dict[str, Part] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not hasattr(module, "load_weight"):
                raise WeightsError(
                    f"{path}.{name} belongs to {type(module).__name__}, which has no load_weight; "
                    "nothing can fill it."
                )
            layer = cast(ParallelLayer, module)
            prefix, _, own = path.rpartition(".")
            for shard_id in layer.shard_ids:
                theirs = original.get((own, shard_id), own)
                full = ".".join(filter(None, (prefix, theirs, name)))
                parts[full] = Part(layer, name, shard_id, layer.full_shape(name, shard_id))
    return parts


def load_weights(model: CausalLM, folder: str | Path, progress: Progress | None = None) -> None:
    """Fills every parameter of this rank from the safetensors files in `folder`.

    `progress` gets a sentence at start, twice a second and at the end. Raises WeightsError, one
    sentence that names the tensor and the file."""
    checkpoint = Checkpoint(Path(folder))
    names = _names_of_parts(model, checkpoint)
    parts = expected_parts(model)
    _check_names(parts, names, checkpoint)
    order = {name: at for at, name in enumerate(checkpoint)}
    filled = _Filled(model)
    report = _Reporter(progress, sum(_num_bytes(checkpoint[names[part]]) for part in parts))
    for name in sorted(parts, key=lambda part: order[names[part]]):
        source = checkpoint[names[name]]
        try:
            filled.load(parts[name], source)
        except ValueError as error:
            file = checkpoint.file_of(names[name])
            raise WeightsError(f"{names[name]} in {file}: {error}") from error
        report.add(_num_bytes(source))
    release_staging()
    filled.check()
    report.done()


def fill_dummy(model: CausalLM, seed: int) -> None:
    """Random weights for benchmarks, without any file: the same model at every TP size.

    A tensor's values depend on the seed, its name and its shape only (and on the kind of device),
    and are cut into shards as a checkpoint's would be."""
    filled = _Filled(model)
    for name, part in expected_parts(model).items():
        filled.load(part, RandomSource(name, part.shape, seed, model.place.device))
    filled.check()


def count_parameters(model: nn.Module) -> int:
    """Elements this rank holds, padding and replicas included, a tied head once."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_digest(config: ModelConfig, max_model_len: int, dtype: torch.dtype) -> str:
    """What ranks must agree on before they start: config, vocabulary, parameter count, code.

    Ranks on other hosts read their own copies of the files and of this program."""
    facts = {
        "config": dataclasses.asdict(config),
        "num_parameters": config.num_parameters,
        "max_model_len": max_model_len,
        "dtype": str(dtype),
        "code": _code_digest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _code_digest() -> str:
    """Of the sources of this program (a few milliseconds)."""
    digest = hashlib.sha256()
    for package in (tp_runtime, tp_runtime.ops, tp_runtime.workers):
        assert package.__file__ is not None
        for source in sorted(Path(package.__file__).resolve().parent.rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _names_of_parts(model: CausalLM, checkpoint: Checkpoint) -> dict[str, str]:
    """Part -> tensor of the checkpoint, after the question of a tied head is settled.

    As transformers 5 does: a head that equals the embedding is the embedding; one that differs
    stays, whatever `tie_word_embeddings` says; where only the head is there, it is both."""
    names = {name: name for name in checkpoint}
    if not model.config.tie_word_embeddings or HEAD not in checkpoint:
        return names
    if EMBEDDING not in checkpoint:
        del names[HEAD]
        names[EMBEDDING] = HEAD
    elif torch.equal(checkpoint[HEAD], checkpoint[EMBEDDING]):
        del names[HEAD]
    else:
        logger.warning(
            "config.json says tie_word_embeddings, but %s in %s differs from %s; both are used as "
            "they are (as transformers does).",
            HEAD,
            checkpoint.folder,
            EMBEDDING,
        )
        model.untie_head()
    return names


def _check_names(
    parts: Mapping[str, Part], names: Mapping[str, str], checkpoint: Checkpoint
) -> None:
    missing = [name for name in parts if name not in names]
    unexpected = [name for name in names if name not in parts and not _IGNORED.search(name)]
    faults = []
    if missing:
        faults.append(f"lacks {_listed(missing)}")
    if unexpected:
        faults.append(f"holds {_listed(unexpected)}, which the model does not have")
    if faults:
        raise WeightsError(
            f"The checkpoint in {checkpoint.folder} {' and '.join(faults)}; config.json and the "
            "weights do not belong together, or a file is missing."
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more tensors" if more > 0 else "")


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Filled:
    """Counts the elements written to each parameter, so that one left out cannot go unseen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: dict[int, int] = {}

    def load(self, part: Part, source: TensorSource) -> None:
        parameter = id(getattr(part.layer, part.parameter))
        count = part.layer.load_weight(part.parameter, source, part.shard_id)
        self._written[parameter] = self._written.get(parameter, 0) + count

    def check(self) -> None:
        """Raises WeightsError naming the first parameter that is not filled exactly once."""
        for name, parameter in self._model.named_parameters():
            written = self._written.get(id(parameter), 0)
            if written != parameter.numel():
                raise WeightsError(
                    f"{written} of the {parameter.numel()} elements of {name} were filled; its "
                    "layer's shard_ids and load_weight do not agree."
                )


class _Reporter:
    """Turns bytes into sentences, twice a second at most."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._seen = 0
        self._started = time.monotonic()
        self._next = self._started
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self._seen += num_bytes
        now = time.monotonic()
        if self._progress is not None and now >= self._next:
            self._next = now + _PROGRESS_EVERY_S
            percent = 100 * self._seen // max(1, self._total)
            self._progress(
                f"Loading weights: {percent} % of {self._total / 2**30:.2f} GiB, "
                f"{now - self._started:.0f} s"
            )

    def done(self) -> None:
        if self._progress is not None:
            seconds = time.monotonic() - self._started
            self._progress(f"Weights loaded: {self._total / 2**30:.2f} GiB in {seconds:.1f} s")
