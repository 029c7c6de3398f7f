"""Mistral (Jiang et al., arXiv:2310.06825): Llama without biases and, in early versions, with a
sliding window in every layer, which arrives through the config."""

from __future__ import annotations

from tp_runtime.workers.models.decoder import CausalLM, Decoder, DecoderLayer
from tp_runtime.workers.models.llama import LlamaAttention


class MistralDecoderLayer(DecoderLayer):
    attention = LlamaAttention


class MistralModel(Decoder):
    layer = MistralDecoderLayer


class MistralForCausalLM(CausalLM):
    decoder = MistralModel
