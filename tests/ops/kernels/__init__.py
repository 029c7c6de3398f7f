"""Triton kernels against their references: in the interpreter, or on the GPU where there is one."""
