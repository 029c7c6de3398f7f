"""Triton kernels, one per file, each with a wrapper that checks shapes and launches it.

Their plain PyTorch references live beside the layers (`ops/norm.py`, `ops/rotary.py`, …). Nothing
imports this package on a machine without CUDA, so triton may be missing there; the tests run the
kernels on a CPU through Triton's interpreter. May import: torch, triton, `tp_runtime.ops.*`.
"""
