"""At start: which of cuBLASLt's algorithms multiplies each weight of the model fastest.

Only on GPUs, in bfloat16 and float16, where the library can be had; elsewhere nothing happens and
products are torch's and our own kernels'. The sizes are a few of decode steps and of prefills.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tp_runtime.cache_folder import cache_folder
from tp_runtime.engine_config import EngineConfig
from tp_runtime.ops.cublas_lt import CublasLt, CublasLtError, CublasLtUnavailableError
from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.graph_timer import GraphTimer
from tp_runtime.ops.linear import (
    MergedColumnParallelLinear,
    PackedColumnLinear,
    RowParallelLinear,
)
from tp_runtime.ops.product import MAX_SILU_ROWS
from tp_runtime.ops.product_search import ProductSearch
from tp_runtime.ops.product_store import ProductStore
from tp_runtime.ops.product_tuning import ProductFamily, ProductTuning
from tp_runtime.ops.tuned_product import DECODE_ROWS, PREFILL_ROWS
from tp_runtime.workers.models.decoder import CausalLM

logger = logging.getLogger(__name__)

BUDGET_S = 12.0
"""For all products together; what is found is kept, so further starts take up where this ended."""

TunedLayer = PackedColumnLinear | RowParallelLinear | ParallelLMHead


@torch.inference_mode()
def tune_products(
    model: CausalLM,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    beat: Callable[[], None],
    say: Callable[[str], None],
    log: bool,
) -> None:
    """Gives the model's layers their `tuned`. Not collective; takes BUDGET_S or little more.

    `beat` is called once a second or so, `say` gets a sentence before a wait."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return
    try:
        library = CublasLt(device)
    except (CublasLtUnavailableError, CublasLtError) as error:
        if log:
            logger.warning("tp_runtime: Matrix products are not tuned: %s", error)
        return
    deadline = time.monotonic() + BUDGET_S
    search = ProductSearch(library, GraphTimer(device), lambda: time.monotonic() < deadline)
    store = ProductStore(_folder(), torch.cuda.get_device_name(device), library.version)
    layers = layers_by_shape(model)
    families = [family_of(same, config) for same in layers]
    products, report = ProductTuning(search, store, beat).tune(families, say)
    for same, product in zip(layers, products, strict=True):
        for layer in same:
            layer.tuned = product
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if log:
        level = logging.WARNING if report.timed else logging.INFO
        logger.log(level, "tp_runtime: %s.", report)


def layers_by_shape(model: torch.nn.Module) -> list[list[TunedLayer]]:
    """The layers that multiply without a bias, those with weights of one shape together, in the
    order of the model."""
    found: dict[tuple[int, ...], list[TunedLayer]] = {}
    for layer in model.modules():
        if not isinstance(layer, PackedColumnLinear | RowParallelLinear | ParallelLMHead):
            continue
        # A row-parallel layer adds its bias after the sum, not in the product.
        if not isinstance(layer, PackedColumnLinear) or layer.bias is None:
            found.setdefault(tuple(layer.weight.shape), []).append(layer)
    return list(found.values())


def family_of(layers: list[TunedLayer], config: EngineConfig) -> ProductFamily:
    """Their weights and the numbers of rows worth a choice."""
    # Up to the first that holds the largest batch.
    below = sum(size < config.max_num_seqs for size in DECODE_ROWS)
    # Gate and up of a few rows are one kernel with their activation.
    own = MAX_SILU_ROWS if isinstance(layers[0], MergedColumnParallelLinear) else 0
    rows = [size for size in DECODE_ROWS[: below + 1] if size > own]
    if not isinstance(layers[0], ParallelLMHead):  # which sees one row per sequence
        rows += [size for size in PREFILL_ROWS if size <= config.max_num_batched_tokens]
    return ProductFamily([layer.weight for layer in layers], rows)


def _folder() -> Path | None:
    try:
        return cache_folder() / "products"
    except RuntimeError:  # a user without a home folder
        return None
