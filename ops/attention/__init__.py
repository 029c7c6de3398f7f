"""Attention over a paged KV cache: what a step hands over, the back-ends, the layer.

A back-end is chosen once at start (`registry.choose_backend`); the layer stores keys and values
and asks it for prefill and decode. May import: torch, triton, `tp_runtime.ops.*`.
"""
