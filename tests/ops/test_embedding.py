"""Vocabulary-parallel embedding and LM head against the whole layer, with real gloo processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gloo_pool import GlooPool
from tp_runtime.ops.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.sharding import vocab_shard

Pools = Callable[[int], GlooPool]
MAKE = {"dtype": torch.float32, "device": "cpu"}
HIDDEN = 8
SIZES = [1, 2, 3, 4]
VOCABS = [101, 5, 128, 1187]
"""1187 on 3 ranks is 151,936 in small: padded to 64 times 7, the last rank holds fewer rows."""


def _weight(vocab: int) -> Tensor:
    return torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(vocab))


def _hidden(rows: int) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))


def _close(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


def _embed(group: TPGroup, vocab: int, ids: list[int]) -> tuple[Tensor, bool]:
    layer = VocabParallelEmbedding(vocab, HIDDEN, group=group, **MAKE)
    layer.weight.fill_(float("nan"))
    filled = layer.load_weight("weight", _weight(vocab))
    whole = filled == layer.weight.numel() and bool(layer.weight.isfinite().all())
    return layer(torch.tensor(ids)), whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_embedding_finds_every_id_on_every_rank(gloo_pool: Pools, size: int, vocab: int) -> None:
    width = vocab_shard(vocab, 0, size).padded
    edges = [0, 1, width - 1, width, 2 * width - 1, vocab - 1, 3, 3]
    ids = [edge for edge in edges if edge < vocab]
    for out, filled in gloo_pool(size).run(_embed, vocab, ids):
        assert filled
        assert torch.equal(out, _weight(vocab)[ids])


def _project(group: TPGroup, vocab: int, rows: int) -> tuple[Tensor, Tensor | None]:
    head = ParallelLMHead(vocab, HIDDEN, group=group, **MAKE)
    head.weight.fill_(float("nan"))
    head.load_weight("weight", _weight(vocab))
    local = head(_hidden(rows))
    return local, head.gather(local)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows", [1, 3])
def test_gathered_logits_are_the_whole_layers_on_rank_zero_alone(
    gloo_pool: Pools, size: int, vocab: int, rows: int
) -> None:
    """Parts laid out rank by rank and not put back by row are right for one row, wrong for two."""
    results = gloo_pool(size).run(_project, vocab, rows)
    full = results[0][1]
    assert full.shape == (rows, vocab)
    _close(full, F.linear(_hidden(rows), _weight(vocab)))
    assert [gathered for _, gathered in results[1:]] == [None] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_padding_columns_are_minus_infinity_on_their_own_shard(
    gloo_pool: Pools, size: int, vocab: int
) -> None:
    """A zero of a padding row beats real logits that are all negative."""
    for rank, (local, _) in enumerate(gloo_pool(size).run(_project, vocab, 2)):
        shard = vocab_shard(vocab, rank, size)
        assert local.shape == (2, shard.padded)
        assert (local[:, shard.size :] == float("-inf")).all()
        assert local[:, : shard.size].isfinite().all()


def _all_negative_argmax(group: TPGroup) -> Tensor:
    head = ParallelLMHead(101, 1, group=group, **MAKE)
    head.load_weight("weight", -1 - torch.arange(101.0).flip(0).unsqueeze(1))
    return head(torch.ones(1, 1)).max(dim=-1).values


def test_padding_never_wins_where_all_logits_are_negative(gloo_pool: Pools) -> None:
    best = torch.cat(gloo_pool(4).run(_all_negative_argmax))
    assert best.tolist() == [-70.0, -38.0, -6.0, -1.0]


def test_a_rank_without_vocabulary_gives_only_minus_infinity(gloo_pool: Pools) -> None:
    local, _ = gloo_pool(4).run(_project, 5, 2)[3]
    assert vocab_shard(5, 3, 4).size == 0
    assert (local == float("-inf")).all()


def test_tied_head_and_embedding_are_one_storage_and_one_parameter() -> None:
    group = TPGroup.single()
    model = torch.nn.ModuleDict()
    embedding = VocabParallelEmbedding(37, HIDDEN, group=group, **MAKE)
    model["embed"] = embedding
    model["head"] = ParallelLMHead(37, HIDDEN, group=group, tied_to=embedding, **MAKE)
    assert model["head"].weight is embedding.weight
    assert len(list(model.parameters())) == 1
    embedding.load_weight("weight", _weight(37))
    _close(model["head"](_hidden(2))[:, :37], F.linear(_hidden(2), _weight(37)))


def test_logits_are_made_in_the_dtype_of_the_weight() -> None:
    head = ParallelLMHead(37, HIDDEN, group=TPGroup.single(), dtype=torch.bfloat16, device="cpu")
    head.load_weight("weight", _weight(37))
    logits = head(_hidden(2).bfloat16())
    want = F.linear(_hidden(2).bfloat16(), _weight(37).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits[:, :37], want)


def test_a_weight_of_another_vocabulary_is_refused() -> None:
    layer = VocabParallelEmbedding(37, HIDDEN, group=TPGroup.single(), **MAKE)
    with pytest.raises(ValueError, match=r"weight should have shape \[37, 8\] .* gives \[38, 8\]"):
        layer.load_weight("weight", _weight(38))
