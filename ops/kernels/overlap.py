"""Programmatic dependent launch: a kernel starts while the one before it still runs.

With it a kernel calls `begin_early` first: the next kernel may be put on the multiprocessors as
soon as there is room. Then it may read what no kernel writes (weights), and calls `wait_before`
ahead of everything else: that returns when the kernel before has ended and its writes are seen.
Every kernel that is launched this way must wait before its first write, too, or it would overwrite
what an earlier one still reads. Both calls do nothing in a kernel that is launched as usual.
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
def begin_early(OVERLAP: tl.constexpr):
    """The next kernel may begin."""
    if OVERLAP == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_before(OVERLAP: tl.constexpr):
    """Returns when the kernel before has ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        if OVERLAP == 2:
            tl.extra.cuda.gdc_launch_dependents()
