"""Faults that real runtimes had, planted one at a time in a loaded model.

Each must turn the comparison with transformers red; one that does not means that the comparison
cannot see that fault.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn

from tp_runtime.ops.attention.layer import Attention
from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.linear import PackedColumnLinear
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.workers.models.decoder import CausalLM, DecoderLayer

Mutation = Callable[[CausalLM], None]


class _Unchanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Unrotated(nn.Module):
    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


def attentions(model: CausalLM) -> list[Attention]:
    """The attention of every layer, in order."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def _layer(model: CausalLM) -> DecoderLayer:
    layer = model.model.layers[-1]
    assert isinstance(layer, DecoderLayer)
    return layer


def _drop_norm(name: str) -> Mutation:
    def mutate(model: CausalLM) -> None:
        assert isinstance(getattr(_layer(model).self_attn, name), RMSNorm)
        setattr(_layer(model).self_attn, name, _Unchanged())

    return mutate


def _drop_bias(path: str, shard_id: str | int | None = None) -> Mutation:
    """Zeroes the bias of one projection in the last layer, on every rank."""

    def mutate(model: CausalLM) -> None:
        _rows(_layer(model).get_submodule(path), "bias", shard_id).zero_()

    return mutate


def _rows(linear: nn.Module, parameter: str, shard_id: str | int | None) -> Tensor:
    value = getattr(linear, parameter)
    assert isinstance(value, nn.Parameter)
    if shard_id is None:
        return value.data
    assert isinstance(linear, PackedColumnLinear)
    at = linear.shard_ids.index(shard_id)
    first = sum(linear.local_sizes[:at])
    return value.data[first : first + linear.local_sizes[at]]


def _sum_bias_over_ranks(path: str) -> Mutation:
    """A row-parallel bias that every rank adds."""

    def mutate(model: CausalLM) -> None:
        _rows(_layer(model).get_submodule(path), "bias", None).mul_(model.place.group.size)

    return mutate


def _drop_rotary(model: CausalLM) -> None:
    _layer(model).self_attn.rotary = _Unrotated()


def _drop_residual(norm_name: str) -> Mutation:
    """norm(x + residual) becomes norm(x), and the old residual is lost."""

    def mutate(model: CausalLM) -> None:
        norm = _layer(model).get_submodule(norm_name)
        whole = norm.forward

        def forward(self: RMSNorm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            normed: Tensor = whole(x)
            return normed, x

        norm.forward = MethodType(forward, norm)

    return mutate


def _drop_replica(parameter: str, shard_id: str) -> Mutation:
    """The second copy of KV head 0 (rank 1 of 4 with 2 KV heads) was never filled."""

    def mutate(model: CausalLM) -> None:
        if model.place.group.rank == 1:
            _rows(_layer(model).self_attn.get_submodule("qkv_proj"), parameter, shard_id).zero_()

    return mutate


def _drop_k_norm_of_replica(model: CausalLM) -> None:
    if model.place.group.rank == 1:
        _drop_norm("k_norm")(model)


def _drop_vocabulary_mask(model: CausalLM) -> None:
    def forward(self: ParallelLMHead, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight).float()

    model.lm_head.forward = MethodType(forward, model.lm_head)  # type: ignore[method-assign]


def _drop_window(model: CausalLM) -> None:
    for attention in attentions(model):
        attention.window = None


def _widen_window(model: CausalLM) -> None:
    for attention in attentions(model):
        assert attention.window is not None
        attention.window += 1


MUTATIONS: dict[str, Mutation] = {
    "q_norm": _drop_norm("q_norm"),
    "k_norm": _drop_norm("k_norm"),
    "q_bias": _drop_bias("self_attn.qkv_proj", "q"),
    "k_bias": _drop_bias("self_attn.qkv_proj", "k"),
    "v_bias": _drop_bias("self_attn.qkv_proj", "v"),
    "o_bias": _drop_bias("self_attn.o_proj"),
    "gate_bias": _drop_bias("mlp.gate_up_proj", 0),
    "up_bias": _drop_bias("mlp.gate_up_proj", 1),
    "down_bias": _drop_bias("mlp.down_proj"),
    "o_bias_on_every_rank": _sum_bias_over_ranks("self_attn.o_proj"),
    "down_bias_on_every_rank": _sum_bias_over_ranks("mlp.down_proj"),
    "rotary": _drop_rotary,
    "attention_residual": _drop_residual("post_attention_layernorm"),
    "mlp_residual": _drop_residual("input_layernorm"),
    "k_replica": _drop_replica("weight", "k"),
    "v_replica": _drop_replica("weight", "v"),
    "k_bias_replica": _drop_replica("bias", "k"),
    "v_bias_replica": _drop_replica("bias", "v"),
    "k_norm_replica": _drop_k_norm_of_replica,
    "vocabulary_mask": _drop_vocabulary_mask,
    "window": _drop_window,
    "window_one_wider": _widen_window,
}
