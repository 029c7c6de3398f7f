"""Which way a sum over the GPUs of a host takes through memory that all of them can write.

One thing decides, the bytes that a rank must send: the fewer they are, the more steps and flags
they cost. It needs no device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class SumWay(Enum):
    """`WORDS`, `FLAGS`: in one step, see `ops.kernels.one_shot`: each word with the number of the
    exchange, or each row with a flag. `TWO_SHOT`: in two steps, see `ops.kernels.two_shot`."""

    WORDS = "one-shot, words with numbers"
    FLAGS = "one-shot, rows with flags"
    TWO_SHOT = "two-shot"


ChooseWay = Callable[[int, int, int], SumWay | None]
"""(rows, bytes of a row, ranks) -> the way; None: none of these. The same on every rank."""

MAX_ROWS = 512
"""Each is a program that waits for others, so all of them must find room on a GPU at once: four of
256 threads on each of an H200's 132 processors."""
_MAX_BYTES = 4 << 20
"""What one rank may send to all others together in one step (beyond, NCCL's ring moves less), and
the largest tensor for two steps."""
_FLAG_BYTES = 1 << 18
"""What the links carry while a flag is raised behind a row: 32 rows of 4,096 elements of two bytes
take as long in words, which are twice the bytes; measured on two H200."""
_STEP_BYTES = 3 << 18
"""What they carry in the time of one more step. Not measured here: vLLM's custom all-reduce takes
two steps from 512 KiB on with four ranks, from 256 KiB with eight; this makes it 512 and 146."""


def choose_way(rows: int, row_bytes: int, ranks: int) -> SumWay | None:
    """The way of least cost, in bytes that the links of one rank carry in the time:

        WORDS      2 (ranks - 1) rows row_bytes
        FLAGS        (ranks - 1) rows row_bytes          + a flag
        TWO_SHOT   2 (ranks - 1) rows row_bytes / ranks  + a flag + one more step

    None where the tensor is too large for all. Two ranks never take two steps, which send no less
    there."""
    return _cheapest(tuple(SumWay), rows, row_bytes, ranks)


def one_shot_only(rows: int, row_bytes: int, ranks: int) -> SumWay | None:
    """As `choose_way`, in one step or not at all."""
    return _cheapest((SumWay.WORDS, SumWay.FLAGS), rows, row_bytes, ranks)


def two_shot_only(rows: int, row_bytes: int, ranks: int) -> SumWay | None:
    """As `choose_way`, in two steps or not at all."""
    return _cheapest((SumWay.TWO_SHOT,), rows, row_bytes, ranks)


def most_rows(choose: ChooseWay, way: SumWay, row_bytes: int, ranks: int) -> int:
    """The most rows that go this way."""
    rows = range(1, MAX_ROWS + 1)
    return max((many for many in rows if choose(many, row_bytes, ranks) is way), default=0)


def _cheapest(ways: tuple[SumWay, ...], rows: int, row_bytes: int, ranks: int) -> SumWay | None:
    tensor = rows * row_bytes
    once = (ranks - 1) * tensor
    cost = {
        SumWay.WORDS: 2 * once,
        SumWay.FLAGS: once + _FLAG_BYTES,
        SumWay.TWO_SHOT: 2 * once // ranks + _FLAG_BYTES + _STEP_BYTES,
    }
    size = {SumWay.WORDS: once, SumWay.FLAGS: once, SumWay.TWO_SHOT: tensor}
    fitting = [way for way in ways if rows <= MAX_ROWS and size[way] <= _MAX_BYTES]
    return min(fitting, key=cost.__getitem__, default=None)
