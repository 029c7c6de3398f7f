"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v and none on o.

`Architecture` (tp_runtime.architectures) fixes the biases; layers past `max_window_layers` may
have a sliding window. Both arrive through the config, so the equations are Llama's.
"""

from __future__ import annotations

from tp_runtime.workers.models.decoder import CausalLM, Decoder, DecoderLayer
from tp_runtime.workers.models.llama import LlamaAttention


class Qwen2DecoderLayer(DecoderLayer):
    attention = LlamaAttention


class Qwen2Model(Decoder):
    layer = Qwen2DecoderLayer


class Qwen2ForCausalLM(CausalLM):
    decoder = Qwen2Model
