"""The host's integers against Triton's own."""

from __future__ import annotations

import triton

from tp_runtime.ops.kernels.host_math import ceil_div, power_of_2


def test_powers_of_two_are_tritons() -> None:
    numbers = [*range(1, 5000), 151_936, 2**31 - 1, 2**31, 2**31 + 1]
    assert [power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]


def test_quotients_are_tritons() -> None:
    pairs = [(a, b) for a in (0, 1, 7, 8, 9, 12_288, 151_936) for b in (1, 2, 7, 8, 128)]
    assert [ceil_div(*pair) for pair in pairs] == [triton.cdiv(*pair) for pair in pairs]
