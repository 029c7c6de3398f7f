"""Layers and kernels: what one rank computes, and how the ranks join their shards.

Lives here: `TPGroup` and its collectives, the sharding rules, parallel linears, vocabulary-parallel
embedding and LM head, norm, rotary, activation, attention with its back-ends, KV store, Triton
kernels. Knows nothing of requests, schedulers, processes, files or model names: sizes come in
through constructors, weights through `load_weight`, the ranks through a `TPGroup`.

May import: torch, triton, and `tp_runtime.ops.*`. Nothing else of tp_runtime (a test checks).
"""
