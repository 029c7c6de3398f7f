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


def extend_hashes(hashes: list[bytes], tokens: array[int], block_size: int) -> None:
    """Appends the hashes of the full blocks of `tokens` (int32) that `hashes` does not cover yet.

    hashes[b] = H(hashes[b - 1], tokens[b * block_size : (b + 1) * block_size])."""
    parent = hashes[-1] if hashes else _ROOT
    blake2b = hashlib.blake2b
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        ids = tokens[start : start + block_size].tobytes()
        parent = blake2b(parent + ids).digest()[:DIGEST_BYTES]
        hashes.append(parent)
