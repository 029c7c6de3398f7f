"""Questions about many token ids at once, asked of the packed bytes that they came in.

A loop over the ids of 256 rows makes 256 Python integers and takes 8 to 15 us, in every step; none
of these takes 3. Pure functions; see `messages.pack_ids` for the packing (int32, little endian).
"""

from __future__ import annotations

import functools
import struct
from array import array

_BITS = 32


def all_below(ids: bytes, bound: int) -> bool:
    """Whether each of the packed ids is in range(bound); `bound` is at most 2^31.

    All bytes are read as one large number with 32 bits for each id. 2^31 - bound is added to every
    id: the upper bit of its place is then set exactly if it is not below the bound, and the upper
    bit of a negative id is set before. The first id at fault may carry into the next place, which
    does not change that there is one."""
    added, upper = _lanes(len(ids) // 4, bound)
    number = int.from_bytes(ids, "little")
    return not ((number | (number + added)) & upper)


@functools.lru_cache(maxsize=16)
def _lanes(count: int, bound: int) -> tuple[int, int]:
    """2^31 - bound in each of `count` places of 32 bits, and the upper bit of each."""
    upper = 1 << (_BITS - 1)
    ones = int.from_bytes(struct.pack("<I", 1) * count, "little")
    return ones * (upper - bound), ones * upper


def columns(steps: list[bytes]) -> list[bytes]:
    """The packed ids of each row, oldest first, from those of each step; all of one length."""
    width, count = len(steps[0]) // 4, len(steps)
    table = array("i", bytes(4 * width * count))
    for step, ids in enumerate(steps):
        table[step::count] = array("i", ids)
    return list(struct.unpack(f"{4 * count}s" * width, table.tobytes()))
