"""Tests of tp_runtime.ops: layers against the unsharded layer, kernels against the reference."""
