"""Comparison of a model folder with transformers: forced logits and greedy tokens, float32."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gloo_pool import GlooPool
from tests.workers.model_harness import RankResult, run_model
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.group import TPGroup

FORCED = 64
PROMPT = 12
NEW_TOKENS = 32
TOLERANCE = 1e-5
"""Of the largest logit."""
SMALLEST_GAP = 1e-4
"""Between the two best logits of a greedy step, so that rounding cannot change the token."""

Pools = Callable[[int], GlooPool]


@dataclass(frozen=True)
class Reference:
    """What transformers computes; `gap` is the smallest top-2 gap of the greedy run."""

    logits: Tensor
    """[FORCED, vocab]."""
    greedy: list[int]
    gap: float


def forced_ids(vocab_size: int, count: int = FORCED) -> list[int]:
    """A random sequence, the same in every process."""
    numbers = random.Random(7)
    return [numbers.randrange(vocab_size) for _ in range(count)]


def load_reference_model(folder: str | Path) -> Any:
    """The model in transformers; every tensor of the folder must have found its place."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


@functools.cache
def reference(folder: Path, greedy: bool = True) -> Reference:
    """One forward over the forced sequence; greedy without any cache, one forward per token."""
    return reference_of(load_reference_model(folder), greedy)


@torch.inference_mode()
def reference_of(model: Any, greedy: bool = True) -> Reference:
    ids = forced_ids(model.config.vocab_size)
    logits = model(torch.tensor([ids])).logits[0].clone()
    tokens, gap = ids[:PROMPT], float("inf")
    for _ in range(NEW_TOKENS if greedy else 0):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return Reference(logits, tokens[PROMPT:], gap)


def run_on_ranks(
    pools: Pools, size: int, folder: Path, greedy: bool = True, **options: Any
) -> list[RankResult]:
    """`run_model` on `size` ranks; one rank runs in this process."""
    forced = forced_ids(ModelConfig.from_folder(folder).vocab_size)
    args = (options, str(folder), forced, PROMPT, NEW_TOKENS if greedy else 0)
    if size == 1:
        return [_run(TPGroup.single(), *args)]
    return pools(size).run(_run, *args)


def _run(group: TPGroup, options: dict[str, Any], *args: Any) -> RankResult:
    return run_model(group, *args, **options)


def differences(results: list[RankResult], wanted: Reference) -> list[str]:
    """What is not as transformers has it; empty when everything is.

    Raises AssertionError when the reference itself cannot tell (a near-tie)."""
    assert wanted.gap > SMALLEST_GAP, f"near-tie in the reference: {wanted.gap}; change the seed"
    found = []
    bound = TOLERANCE * wanted.logits.abs().max()
    first = results[0]
    for name, logits in (("prefill", first.prefill), ("paged", first.paged)):
        assert logits is not None
        assert logits.shape == wanted.logits.shape
        error = (logits - wanted.logits).abs().max()
        if not error <= bound:  # NaN too
            found.append(f"{name}: logits are {error:.3g} away, allowed are {bound:.3g}")
    for rank, result in enumerate(results):
        if result.greedy != wanted.greedy:
            found.append(f"rank {rank}: greedy {result.greedy} instead of {wanted.greedy}")
        if result.checksum != first.checksum:
            found.append(f"rank {rank}: hidden states differ from those of rank 0")
        if rank and (result.prefill is not None or result.paged is not None):
            found.append(f"rank {rank} got gathered logits")
    return found
