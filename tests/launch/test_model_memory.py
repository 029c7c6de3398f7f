"""The doctor's memory per rank is that of the layers and of the KV cache themselves."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import KINDS, tiny_config
from tp_runtime.launch.model_memory import GIB, RankMemory, rank_memory, rank_parameters
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import SingleCommunicator, TPGroup
from tp_runtime.workers.kv_cache import KVGeometry
from tp_runtime.workers.models.registry import build_model

VARIANTS = [
    *((kind, {}) for kind in KINDS),
    ("qwen3", {"tie_word_embeddings": True, "vocab_size": 1000, "intermediate_size": 700}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8}),
]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_counts_are_those_of_the_layers_of_every_rank(kind, changes, ranks):
    config = ModelConfig.from_dict(tiny_config(kind, **changes))
    cpu, backend = torch.device("cpu"), ReferenceBackend()
    largest_block = 0
    for rank in range(ranks):
        group = TPGroup(rank, ranks, SingleCommunicator())
        model = build_model(config, group, torch.float32, cpu, backend, 64)
        assert rank_parameters(config, rank, ranks) == sum(p.numel() for p in model.parameters())
        geometry = KVGeometry.of(config, group, 1, torch.float32)
        largest_block = max(largest_block, geometry.block_bytes)
    assert rank_memory(config, ranks, 4).kv_per_token == largest_block


def test_one_rank_holds_what_the_checkpoint_holds_and_the_padding():
    config = ModelConfig.from_dict(tiny_config("qwen3", vocab_size=64 * 7))
    assert rank_parameters(config, 0, 1) == config.num_parameters


def test_more_ranks_than_query_heads_have_no_memory():
    config = ModelConfig.from_dict(tiny_config("qwen3"))
    with pytest.raises(ValueError, match="4 query heads"):
        rank_memory(config, 5, 2)


def test_the_cache_gets_what_weights_and_the_largest_step_leave():
    memory = RankMemory(ranks=1, weights=10 * GIB, kv_per_token=1 << 20, work=2 * GIB)
    assert memory.cache_tokens(20 * GIB, utilization=0.9) == 6 * 1024
    assert memory.cache_tokens(13 * GIB, utilization=0.9) == 0
