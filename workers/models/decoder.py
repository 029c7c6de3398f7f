"""The decoder that the Llama family shares: pre-norm layers along one residual stream.

    h = embed(ids)
    for each layer:   h = h + attention(norm(h));   h = h + mlp(norm(h))
    logits = head(norm(h))

The addition happens inside the next norm, which returns the sum as the new residual. An
architecture file gives its attention (and whatever else differs) and inherits the rest. Every class
takes the whole model's sizes; how they are spread over the ranks shows only in the class names of
the layers. Knows nothing of files, requests or of how the cache is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.activation import SiluAndMul
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.linear import MergedColumnParallelLinear, RowParallelLinear
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.normed_linear import add_norm, normed_gate_up
from tp_runtime.ops.partial import Hidden
from tp_runtime.ops.rotary import RotaryEmbedding


@dataclass(frozen=True)
class Placement:
    """Where a model is built: the ranks, the number format, the device, the attention back-end."""

    group: TPGroup
    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend

    @property
    def sharded(self) -> dict[str, Any]:
        """Keyword arguments of the layers that are spread over the ranks."""
        return {"group": self.group, **self.replicated}

    @property
    def replicated(self) -> dict[str, Any]:
        """Keyword arguments of the layers that every rank holds whole."""
        return {"dtype": self.dtype, "device": self.device}


class GatedMLP(nn.Module):
    """down(silu(gate(n)) * up(n)) with n = norm(x + residual); gate and up are one matrix product,
    and for one token on a GPU the norm is part of its kernel."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        hidden, inter = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inter, inter], bias=config.mlp_bias, **place.sharded
        )
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(
            inter, hidden, bias=config.mlp_bias, sum_later=True, **place.sharded
        )

    def forward(self, x: Hidden, residual: Tensor, norm: RMSNorm) -> tuple[Hidden, Tensor]:
        """MLP of norm(x + residual), and that sum; all [tokens, hidden]."""
        gated, residual = normed_gate_up(x, residual, norm, self.gate_up_proj, self.act)
        return self.down_proj(gated), residual


class DecoderLayer(nn.Module):
    """Norm and attention, norm and MLP; two all-reduces."""

    attention: ClassVar[type[nn.Module]]
    """Built as attention(config, layer index, rotary, placement). Called as forward(positions, x,
    residual, norm, kv, meta); returns (attention of norm(x + residual), that sum)."""
    feed_forward: ClassVar[type[nn.Module]] = GatedMLP
    """Built as feed_forward(config, placement). Called as forward(x, residual, norm); returns (MLP
    of norm(x + residual), that sum)."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, **place.replicated)
        self.self_attn = self.attention(config, layer, rotary, place)
        self.post_attention_layernorm = RMSNorm(size, eps, **place.replicated)
        self.mlp = self.feed_forward(config, place)

    def forward(
        self,
        positions: Tensor,
        hidden: Hidden,
        residual: Tensor | None,
        kv: LayerKV,
        meta: AttentionMetadata,
    ) -> tuple[Hidden, Tensor]:
        """`hidden` [tokens, hidden] has yet to be added up over the ranks and to `residual` (None:
        the first layer, whose input is the residual); the same holds for the pair returned."""
        hidden, residual = self.self_attn(
            positions, hidden, residual, self.input_layernorm, kv, meta
        )
        out: tuple[Hidden, Tensor] = self.mlp(hidden, residual, self.post_attention_layernorm)
        return out


class Decoder(nn.Module):
    """Embedding, layers, last norm; 2 * layers + 1 all-reduces."""

    layer: ClassVar[type[DecoderLayer]]

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, place: Placement) -> None:
        super().__init__()
        self.backend, self.windows = place.backend, frozenset(config.windows)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, sum_later=True, **place.sharded
        )
        self.layers = nn.ModuleList(
            self.layer(config, index, rotary, place) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place.replicated)

    def embed(self, input_ids: Tensor) -> Hidden:
        """[tokens] -> [tokens, hidden]"""
        out: Hidden = self.embed_tokens(input_ids)
        return out

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv: list[LayerKV], meta: AttentionMetadata
    ) -> Tensor:
        """[tokens] int64 twice -> [tokens, hidden]"""
        if meta.decode is not None:
            self.backend.prepare_decode(meta.decode, kv[0], self.windows)
        hidden: Hidden
        residual: Tensor | None
        hidden, residual = self.embed(input_ids), None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            hidden, residual = layer(positions, hidden, residual, layer_kv, meta)
        normed, _ = add_norm(hidden, residual, self.norm)
        return normed


class CausalLM(nn.Module):
    """A decoder and its head. Logits are apart from `forward`: few rows need them."""

    decoder: ClassVar[type[Decoder]]
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    """Name in a checkpoint -> (our layer, which part of it)."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.place = place
        self.model = self.decoder(config, rotary, place)
        self.lm_head = self._head(tied=config.tie_word_embeddings)

    def _head(self, tied: bool) -> ParallelLMHead:
        return ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            tied_to=self.model.embed_tokens if tied else None,
            **self.place.sharded,
        )

    def untie_head(self) -> None:
        """Gives the head a weight of its own, yet to be filled (see the loader)."""
        self.lm_head = self._head(tied=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv: list[LayerKV], meta: AttentionMetadata
    ) -> Tensor:
        """input_ids, positions [tokens] int64 -> hidden states after the last norm
        [tokens, hidden]; keys and values are written to `kv`, one entry per layer."""
        hidden: Tensor = self.model(input_ids, positions, kv, meta)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> this rank's logits [rows, padded] (see ParallelLMHead)."""
        logits: Tensor = self.lm_head(hidden)
        return logits
