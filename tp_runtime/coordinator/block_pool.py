"""KV blocks: who holds each, which are free, and which free or held ones have known contents.

A block is *held* while its reference count is above zero. A block whose contents are registered
under a hash can be found again, also after its last holder let go: it then waits in least-recently-
used order and is given out anew only when no plain free block is left. Blocks are numbers; nothing
is known of sequences, tokens or tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tp_runtime.errors import TPRuntimeError


class BlockPool:
    """`num_blocks` blocks numbered from 0, all free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with known contents, least recently used first."""
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those with known contents included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks, held or free, whose contents can be found by hash."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each and no known contents.

        The caller has made sure that `num_free` is large enough."""
        plain = len(self._free) - min(count, len(self._free))
        taken = self._free[plain:]
        del self._free[plain:]
        taken.reverse()
        for _ in range(count - len(taken)):
            block, _none = self._cached.popitem(last=False)
            self.forget(block)
            taken.append(block)
        references = self._references
        for block in taken:
            references[block] = 1
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`; nothing is held yet (see `share`)."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would no longer be free once shared."""
        return sum(not self._references[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, as returned by `find`."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a table, given in table order.

        The end of the table becomes the older part: a prefix is worth more than what follows it,
        and without it the rest cannot be found."""
        references, hash_of = self._references, self._hash_of
        free, cached = self._free, self._cached
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if left == 0:
                if hash_of[block] is None:
                    free.append(block)
                else:
                    cached[block] = None
            elif left < 0:
                raise TPRuntimeError(f"KV block {block} was freed twice.")

    def register(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """The contents of these held blocks are those of `hashes`, of each in turn.

        When another block has them already, that one stays the one to be found; this one is an
        ordinary block of its holder and free of contents afterwards."""
        find_or_set, hash_of = self._block_of.setdefault, self._hash_of
        for block, digest in zip(blocks, hashes, strict=True):
            if find_or_set(digest, block) == block:
                hash_of[block] = digest

    def forget(self, block: int) -> None:
        """The contents of `block` can no longer be found; its holders keep it."""
        digest = self._hash_of[block]
        if digest is None:
            return
        del self._block_of[digest]
        self._hash_of[block] = None
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check_idle(self) -> None:
        """Constant time: every block is free. Raises TPRuntimeError naming the number lost."""
        if self.num_free != self.num_blocks:
            raise TPRuntimeError(
                f"{self.num_blocks - self.num_free} KV blocks are held though nothing runs."
            )

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables` are all block tables there are. Raises TPRuntimeError at the first fault."""
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise TPRuntimeError(f"A block is twice in one table: {list(table)}.")
            held.update(table)
        free = Counter([*self._free, *self._cached])
        for block in range(self.num_blocks):
            references, digest = self._references[block], self._hash_of[block]
            if references != held[block]:
                raise TPRuntimeError(
                    f"KV block {block} has {references} references and {held[block]} holders."
                )
            if free[block] != (references == 0):
                raise TPRuntimeError(
                    f"KV block {block} with {references} references is {free[block]} times free."
                )
            if references == 0 and (block in self._cached) != (digest is not None):
                raise TPRuntimeError(f"Free KV block {block} is in the wrong list.")
            if digest is not None and self._block_of.get(digest) != block:
                raise TPRuntimeError(f"The hash of KV block {block} leads elsewhere.")
        if len(self._block_of) != sum(digest is not None for digest in self._hash_of):
            raise TPRuntimeError("A hash leads to a KV block that does not know it.")
