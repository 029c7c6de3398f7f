"""A worst-case step before traffic, so that out-of-memory shows at start and not at 3 a.m.

The step is the largest the settings allow: a full prefill budget and `max_num_seqs` rows of logits,
with every cache slot -1. It also loads kernels and lets the allocator find its size.
"""

from __future__ import annotations

import torch

from tp_runtime.engine_config import EngineConfig
from tp_runtime.ops.attention.metadata import AttentionMetadata, PrefillMetadata
from tp_runtime.workers.kv_cache import KVGeometry
from tp_runtime.workers.models.decoder import CausalLM


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
    count = tokens // length
    total = count * length
    ids = torch.zeros(total, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device).repeat(count)
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
    hidden = model(ids, positions, geometry.allocate(1, device), meta)
    rows = hidden[: config.max_num_seqs]
    logits = model.lm_head.gather(model.compute_logits(rows))
    if logits is not None:
        logits.float().softmax(-1).sort(-1)  # the full sampler's largest temporaries
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
