"""Llama (Touvron et al., arXiv:2302.13971; Llama 3: arXiv:2407.21783)."""

from __future__ import annotations

from torch import Tensor, nn

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.layer import Attention
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.linear import QKVParallelLinear, RowParallelLinear
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.normed_linear import normed_linear
from tp_runtime.ops.partial import Hidden
from tp_runtime.ops.rotary import RotaryEmbedding
from tp_runtime.ops.rotate_and_store import rotate_and_store
from tp_runtime.workers.models.decoder import CausalLM, Decoder, DecoderLayer, Placement


class LlamaAttention(nn.Module):
    """o(softmax(rotate(q) rotate(k)^T / sqrt(head_dim)) v), grouped queries, causal.

    Biases as the config says, on q, k, v and on o. With a window the layer sees only the last
    tokens; Llama itself has none."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=config.attention_bias,
            **place.sharded,
        )
        self.rotary = rotary
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            head_dim**-0.5,
            config.windows[layer],
            place.backend,
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * head_dim,
            config.hidden_size,
            bias=config.attention_out_bias,
            input_shard=self.qkv_proj.heads.q.scaled(head_dim),
            sum_later=True,
            **place.sharded,
        )

    def forward(
        self,
        positions: Tensor,
        x: Hidden,
        residual: Tensor | None,
        norm: RMSNorm,
        kv: LayerKV,
        meta: AttentionMetadata,
    ) -> tuple[Hidden, Tensor]:
        """Attention of norm(x + residual), and that sum; positions [tokens], the rest
        [tokens, hidden]."""
        qkv, residual = normed_linear(x, residual, norm, self.qkv_proj)
        q, k, v = self.qkv_proj.split(qkv)
        q, k = rotate_and_store(q, k, v, positions, self.rotary, kv, meta)
        return self.o_proj(self.attn.attend(q, k, v, kv, meta)), residual


class LlamaDecoderLayer(DecoderLayer):
    attention = LlamaAttention


class LlamaModel(Decoder):
    layer = LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    decoder = LlamaModel
