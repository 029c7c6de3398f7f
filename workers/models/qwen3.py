"""Qwen3 (arXiv:2505.09388): Llama with a norm over each head of q and k before the rotation.

The head size is not hidden_size / heads. Layers may have a sliding window. The written description
skips the norms where q, k and v have biases; transformers never skips them, and neither does this.
"""

from __future__ import annotations

from torch import Tensor

from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.metadata import AttentionMetadata, LayerKV
from tp_runtime.ops.norm import RMSNorm
from tp_runtime.ops.normed_linear import normed_linear
from tp_runtime.ops.partial import Hidden
from tp_runtime.ops.rotary import RotaryEmbedding
from tp_runtime.ops.rotate_and_store import rotate_and_store
from tp_runtime.workers.models.decoder import CausalLM, Decoder, DecoderLayer, Placement
from tp_runtime.workers.models.llama import LlamaAttention


class Qwen3Attention(LlamaAttention):
    """o(softmax(rotate(norm(q)) rotate(norm(k))^T / sqrt(head_dim)) v)

    The norms run over head_dim and have one weight [head_dim] for all heads, on every rank."""

    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, place: Placement
    ) -> None:
        super().__init__(config, layer, rotary, place)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **place.replicated)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **place.replicated)

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
        norms = (self.q_norm, self.k_norm)
        q, k = rotate_and_store(q, k, v, positions, self.rotary, kv, meta, *norms)
        return self.o_proj(self.attn.attend(q, k, v, kv, meta)), residual


class Qwen3DecoderLayer(DecoderLayer):
    attention = Qwen3Attention


class Qwen3Model(Decoder):
    layer = Qwen3DecoderLayer


class Qwen3ForCausalLM(CausalLM):
    decoder = Qwen3Model
