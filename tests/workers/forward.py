"""One prefill of a whole sequence through a model, logits at every position."""

from __future__ import annotations

import torch
from torch import Tensor

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import AttentionMetadata, PrefillMetadata
from tp_runtime.ops.group import TPGroup
from tp_runtime.workers.kv_cache import KVGeometry
from tp_runtime.workers.models.decoder import CausalLM


def all_logits(
    model: CausalLM, config: ModelConfig, backend: AttentionBackend, ids: Tensor
) -> Tensor:
    """`ids` [T] int64 -> [T, vocab] float32, on one rank."""
    n, device = len(ids), ids.device
    block_size = backend.default_block_size()
    geometry = KVGeometry.of(config, TPGroup.single(), block_size, model.lm_head.weight.dtype)
    meta = AttentionMetadata(
        slot_mapping=torch.arange(n, device=device),
        prefill=PrefillMetadata(
            cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32, device=device),
            context_lens=torch.tensor([n], dtype=torch.int32, device=device),
            block_tables=None,
            max_seqlen_q=n,
            max_seqlen_k=n,
        ),
    )
    kv = geometry.allocate(-(-n // block_size), device)
    hidden = model(ids, torch.arange(n, device=device), kv, meta)
    logits = model.lm_head.gather(model.compute_logits(hidden))
    if logits is None:
        raise AssertionError("rank 0 of one has the logits")
    return logits
