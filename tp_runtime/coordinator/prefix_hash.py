"""Content hashes of full KV blocks, chained from the start of the sequence.

K and V at a position depend on the model and on all ids up to it, and on nothing else: positions
count from 0 in every sequence and there are no adapters. One block pool serves one model, so the
chain of ids is the whole identity of a block. 128 bit of BLAKE2b: a collision would give one
request another one's context, so it must not happen by chance nor by intent.

Pure functions; nothing is known of blocks or of the scheduler.
"""

from __future__ import annotations

import hashlib
from array import array

DIGEST_BYTES = 16
_ROOT = bytes(DIGEST_BYTES)


def extend_hashes(
    hashes: list[bytes], tokens: array[int], block_size: int, stop: int | None = None
) -> None:
    """Appends the hashes of the full blocks of `tokens` (int32) that `hashes` does not cover yet,
    of the first `stop` blocks at most.

    hashes[b] = H(hashes[b - 1], tokens[b * block_size : (b + 1) * block_size])."""
    parent = hashes[-1] if hashes else _ROOT
    blake2b, width = hashlib.blake2b, block_size * tokens.itemsize
    full = len(tokens) // block_size
    stop = full if stop is None else min(stop, full)
    ids = tokens[len(hashes) * block_size : stop * block_size].tobytes()
    for start in range(0, len(ids), width):
        parent = blake2b(parent + ids[start : start + width]).digest()[:DIGEST_BYTES]
        hashes.append(parent)
