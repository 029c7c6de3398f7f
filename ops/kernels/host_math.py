"""Integers that a launch is made of.

`triton.cdiv` and `triton.next_power_of_2` serve kernels as well, for which they take ten
microseconds a call on the host: longer than a launch should.
"""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up; b > 0."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()
