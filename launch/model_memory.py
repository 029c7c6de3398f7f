"""How much memory one rank needs for a model: pure functions of ModelConfig and the sharding rules.

Counts are those of the rank that holds most. Nothing is loaded, torch is not imported; that the
counts are the layers' own is what tests/launch/test_model_memory.py checks. What a step needs
beside weights and KV cache is an estimate; a server measures it when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.sharding import kv_head_shard, tile_shard, vocab_shard

GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_RUNTIME_BYTES = 3 * GIB // 4
"""CUDA context, NCCL buffers, captured graphs: seen on an H200, rounded up."""
_SORT_COPIES = 8
"""Float32 copies of the gathered logits while rows are sorted: logits, softmax, sorted values,
64-bit indices and the sort's own space."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the fullest rank at one tensor-parallel size."""

    ranks: int
    weights: int
    kv_per_token: int
    work: int
    """Largest step, beside weights and cache; estimated."""

    def cache_tokens(self, device_bytes: int, utilization: float = 0.9) -> int:
        """Tokens of KV cache that fit into a device of this size; 0 when the weights do not."""
        room = int(device_bytes * utilization) - self.weights - self.work
        return max(0, room // self.kv_per_token)


def rank_memory(
    model: ModelConfig, ranks: int, itemsize: int, step_tokens: int = 8192, step_rows: int = 256
) -> RankMemory:
    """For a KV cache and weights of `itemsize` bytes a number.

    Raises ValueError when there are more ranks than query heads."""
    shards = [kv_head_shard(model.num_heads, model.num_kv_heads, r, ranks) for r in range(ranks)]
    kv_heads = max(shard.kv.size for shard in shards)
    return RankMemory(
        ranks,
        max(rank_parameters(model, rank, ranks) for rank in range(ranks)) * itemsize,
        2 * model.num_layers * kv_heads * model.head_dim * itemsize,
        _work_bytes(model, ranks, itemsize, step_tokens, step_rows),
    )


def rank_parameters(model: ModelConfig, rank: int, ranks: int) -> int:
    """Elements of this rank's parameters, padding rows of the vocabulary included.

    Raises ValueError when there are more ranks than query heads."""
    hidden = model.hidden_size
    heads = kv_head_shard(model.num_heads, model.num_kv_heads, rank, ranks)
    q, kv = heads.q.size * model.head_dim, heads.kv.size * model.head_dim
    inter = tile_shard(model.intermediate_size, rank, ranks).size
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inter + 2 * hidden
    layer += (q + 2 * kv) if model.attention_bias else 0
    layer += hidden if model.attention_out_bias else 0
    layer += (2 * inter + hidden) if model.mlp_bias else 0
    layer += 2 * model.head_dim if model.qk_norm else 0
    tables = 1 if model.tie_word_embeddings else 2
    table = vocab_shard(model.vocab_size, rank, ranks).padded * hidden
    return model.num_layers * layer + tables * table + hidden


def _work_bytes(model: ModelConfig, ranks: int, itemsize: int, tokens: int, rows: int) -> int:
    """The larger of one layer's activations and the sampling of all rows."""
    inter = -(-model.intermediate_size // ranks)
    heads = -(-model.num_heads // ranks) + 2 * max(1, -(-model.num_kv_heads // ranks))
    widths = 4 * model.hidden_size + 3 * inter + 2 * heads * model.head_dim
    sampling = rows * model.vocab_size * 4 * _SORT_COPIES
    return _RUNTIME_BYTES + max(tokens * widths * itemsize, sampling)
