"""What a model does besides being right: collectives, one storage for tied weights, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import KINDS, make_tiny, tiny_config
from tests.workers.model_harness import PagedModel, load_model
from tests.workers.parity import Pools, differences, reference_of, run_on_ranks
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import Communicator, SingleCommunicator, TPGroup
from tp_runtime.workers.loader import count_parameters
from tp_runtime.workers.models.registry import build_model


class CountingCommunicator:
    """Counts the collectives that go through it."""

    name = "counting"

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        return self._inner.all_reduce(x)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        self.calls["begin_all_reduce"] += 1
        return self._inner.begin_all_reduce(x)

    def sums_in_parts(self, rows: int) -> int:
        return self._inner.sums_in_parts(rows)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        return self._inner.all_reduce_norm(x, residual, weight, eps)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.calls["all_gather"] += 1
        return self._inner.all_gather(x)

    def gather(self, x: Tensor, dst: int = 0) -> list[Tensor] | None:
        self.calls["gather"] += 1
        return self._inner.gather(x, dst)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        self.calls["broadcast"] += 1
        return self._inner.broadcast(x, src)

    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        self.calls["all_to_all"] += 1
        return self._inner.all_to_all(out, x)

    def barrier(self) -> None:
        self.calls["barrier"] += 1
        self._inner.barrier()

    def close(self) -> None:
        self._inner.close()


def _collectives(group: TPGroup, folder: str) -> list[dict[str, int]]:
    """Calls made by a prefill, by a decode step, by the logits, by their gather."""
    counting = CountingCommunicator(group.comm)
    model = load_model(TPGroup(group.rank, group.size, counting), folder, 64)
    paged = PagedModel(model, 16)
    sequence = paged.sequence(32)
    counts = []
    counting.calls.clear()
    _, hidden = paged.step([], (sequence, [1, 2, 3, 4, 5]))
    counts.append(dict(counting.calls))
    counting.calls.clear()
    paged.step([(sequence, 6)])
    counts.append(dict(counting.calls))
    counting.calls.clear()
    local = model.compute_logits(hidden)
    counts.append(dict(counting.calls))
    model.lm_head.gather(local)
    counts.append(dict(counting.calls))
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_two_all_reduces_per_layer_and_one_for_the_embedding(
    kind: str, tmp_path: Path, gloo_pool: Pools
) -> None:
    folder = make_tiny(kind, tmp_path, num_hidden_layers=3)
    for counts in gloo_pool(2).run(_collectives, str(folder)):
        forward = {"all_reduce": 2 * 3 + 1}
        assert counts == [forward, forward, {}, {"gather": 1}]


def test_tied_embedding_and_head_are_one_storage(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, tie_word_embeddings=True)
    model = load_model(TPGroup.single(), folder, 64)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert head.data_ptr() == embedding.data_ptr()
    untied = make_tiny("qwen3", tmp_path / "untied")
    both = load_model(TPGroup.single(), untied, 64)
    assert count_parameters(both) - count_parameters(model) == head.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_config_counts_the_parameters_that_the_model_has(kind: str) -> None:
    """`num_parameters` (memory estimates, the digest) against transformers' own model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    variants: list[dict[str, Any]] = [{}, {"tie_word_embeddings": True}]
    if kind in ("llama", "qwen3"):
        variants.append({"attention_bias": True})
    if kind == "llama":
        variants.append({"attention_bias": True, "mlp_bias": True})
    for fields in variants:
        raw = tiny_config(kind, **fields)
        theirs = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(theirs)
        assert ModelConfig.from_dict(raw).num_parameters == sum(
            parameter.numel() for parameter in model.parameters()
        )


def test_more_ranks_than_query_heads_are_refused_naming_both(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(tiny_config("llama"))
    group = TPGroup(0, 5, SingleCommunicator())
    with pytest.raises(ConfigError, match=r"size 5 .* 4 query heads"):
        build_model(config, group, torch.float32, "cpu", ReferenceBackend(), 64)


def test_the_log_names_what_is_fixed_or_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    fields: dict[str, Any] = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "my_run": "x"}
    config = ModelConfig.from_dict(tiny_config("llama", **fields))
    build_model(config, TPGroup.single(), torch.float32, "cpu", ReferenceBackend(), 640)
    assert "for sequences of 640 tokens" in caplog.text
    assert "ignored as transformers ignores them: my_run." in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_saved_by_transformers_loads(kind: str, tmp_path: Path, gloo_pool: Pools) -> None:
    """config.json, index and shards as `save_pretrained` of transformers 5 writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(**tiny_config(kind))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    results = run_on_ranks(gloo_pool, 2, tmp_path, greedy=False)
    assert differences(results, reference_of(model, greedy=False)) == []
