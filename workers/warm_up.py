"""A worst-case step before traffic, so that out-of-memory shows at start and not at 3 a.m.

The step is the largest the settings allow: a full prefill budget and `max_num_seqs` rows of logits,
with every cache slot -1. It also loads kernels and lets the allocator find its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tp_runtime.engine_config import EngineConfig
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV, PrefillMetadata
from tp_runtime.ops.sampling.sampler import SamplingBatch, SamplingClass, sample
from tp_runtime.workers.kv_cache import KVGeometry
from tp_runtime.workers.models.decoder import CausalLM

_SHORT = (8, 64, 128, 256, 512, 1024, 2048)
"""Tokens of prefills that load the kernels which only short ones use: the first request of that
length would wait a tenth of a second for them."""


@torch.inference_mode()
def warm_up(
    model: CausalLM,
    geometry: KVGeometry,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Runs the step (collective); returns the bytes it needed beyond the model, 0 on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    tokens = config.max_num_batched_tokens if device.type == "cuda" else 16
    length = min(tokens, max_model_len)
    kv = geometry.allocate(1, device)
    for short in _SHORT if device.type == "cuda" else ():
        _prefill(model, kv, 1, min(short, length), device)
    hidden = _prefill(model, kv, tokens // length, length, device)
    rows = hidden[: config.max_num_seqs]
    logits = model.lm_head.gather(model.compute_logits(rows))
    if logits is not None:
        sample(logits, _full_batch(len(logits), device))
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _full_batch(rows: int, device: torch.device) -> SamplingBatch:
    """Parameters with which a draw needs the most memory."""
    ones = torch.ones(rows, device=device)
    whole = torch.ones(rows, dtype=torch.int64, device=device)
    return SamplingBatch(
        kind=SamplingClass.FULL,
        temperature=ones,
        seed=whole,
        position=whole,
        top_k=5 * whole,
        top_p=0.9 * ones,
        min_p=0.01 * ones,
        min_position=0 * whole,
    )


def _prefill(
    model: CausalLM, kv: list[LayerKV], count: int, length: int, device: torch.device
) -> Tensor:
    """Hidden states of `count` sequences of `length` tokens, of which nothing is stored."""
    total = count * length
    meta = AttentionMetadata(
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        prefill=PrefillMetadata(
            cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device) * length,
            context_lens=torch.full((count,), length, dtype=torch.int32, device=device),
            block_tables=None,
            max_seqlen_q=length,
            max_seqlen_k=length,
        ),
    )
    ids = torch.zeros(total, dtype=torch.int64, device=device)
    out: Tensor = model(ids, torch.arange(length, device=device).repeat(count), kv, meta)
    return out
