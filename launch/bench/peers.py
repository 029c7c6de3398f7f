"""What others reach on the same work, to stand beside our rows. Measured, not quoted from papers.

Conditions: 2 x H200 of one host, torch 2.11.0+cu130, random bf16 weights in Qwen3's shapes.
nano-vllm with FlashAttention-3; vLLM 0.25.1 with FlashAttention-3, its custom all-reduce,
torch.compile and CUDA graphs, without FlashInfer's sampler and without symmetric memory.
"""

from __future__ import annotations

from typing import NamedTuple

CONDITIONS = "peers: 2 x H200, bf16, nano-vllm with FlashAttention-3, vLLM 0.25.1"


class Peer(NamedTuple):
    """`limit`: weights, KV cache and prefill at the rates measured there."""

    limit: float
    nano_vllm: float | None
    vllm: float | None
    goal: float


THROUGHPUT: dict[tuple[str, int], Peer] = {
    ("qwen3-0.6b", 1): Peer(35_700, 16_417, 22_946, 28_000),
    ("qwen3-0.6b", 2): Peer(65_000, 20_587, 30_806, 36_000),
    ("qwen3-8b", 1): Peer(11_900, 8_191, 9_216, 10_300),
    ("qwen3-8b", 2): Peer(23_700, 11_037, 14_160, 17_000),
}
"""Generated tokens per second on the throughput workload, by shape and tensor-parallel size."""

BATCH_ONE: dict[tuple[str, int], Peer] = {
    ("qwen3-0.6b", 1): Peer(0.28, 2.17, 2.33, 1.0),
    ("qwen3-0.6b", 2): Peer(0.14, 2.95, 2.72, 1.0),
    ("qwen3-8b", 1): Peer(3.54, 5.75, 5.26, 4.4),
    ("qwen3-8b", 2): Peer(1.77, 5.20, 4.08, 2.9),
    ("qwen3-32b", 2): Peer(7.5, None, None, 9.8),
}
"""Milliseconds per token of one prompt with 256 new tokens, whole call; limits without
all-reduces."""
