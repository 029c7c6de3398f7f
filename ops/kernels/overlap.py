"""Programmatic dependent launch: a kernel is put in place while the one before it still runs.

A kernel launched this way may at once read what the kernel in front does not write: weights, and
what a kernel before that one wrote (which had ended when the one in front let this one come). It
calls `after_previous` ahead of everything else: that returns when the kernel before has ended and
its writes are seen. Every such kernel must call it before its first write, too, or it would
overwrite what an earlier one still reads. The call does nothing in a kernel that is launched as
usual.

It also lets the next kernel come, no earlier: programs that come while the kernel before the one
before still runs are spread unevenly over the processors, and attention was 4 to 12 us slower for
it on an H200.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@functools.cache
def _can_overlap(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def overlaps(x: Tensor) -> bool:
    """Whether kernels on the device of `x` are launched so: GPUs since Hopper."""
    return x.is_cuda and _can_overlap(x.device.index or 0)


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Returns when the kernel before has ended; the next one may be put in place."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
