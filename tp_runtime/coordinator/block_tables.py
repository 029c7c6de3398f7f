"""The block tables of sequences: given at admission, grown while decoding, shared by content.

Joins the pool (numbers), the hashes (contents) and the sequences (tables). When blocks may be let
go is decided by the scheduler, which knows the steps under way.

Full blocks of a prompt are offered to the prefix cache when their chunk is planned. Those of
generated tokens wait, since hashing them costs more than anything else in a steady step: until
there is time, until the table is closed, or until an arrival begins like the sequence and would
miss them. So nobody can tell that they waited.
"""

from __future__ import annotations

from tp_runtime.coordinator.block_pool import BlockPool
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.prefix_hash import extend_hashes
from tp_runtime.coordinator.scheduler_stats import SchedulerCounters
from tp_runtime.coordinator.sequence import Sequence, SequenceState

FEW_LATE = 8
"""Blocks that a sequence fills before it is worth looking at when there is time."""
MOST_LATE = 512
"""Blocks that wait though there never is time: so many and, spread by the order number of the
sequence, up to twice as many. Closing a table offers them at 1.5 to 2 us each, so this bounds it to
2 ms."""
AT_ONCE = 64
"""Blocks that are offered in one go when there is time."""


class BlockTables:
    """Owns the pool."""

    def __init__(self, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self._caching = limits.enable_prefix_caching
        self._counters = counters
        self._open: dict[Sequence, None] = {}
        """Those that have a table."""
        self._late: dict[Sequence, None] = {}
        """Those with more than a few blocks to offer, longest waiting first."""

    def __len__(self) -> int:
        """Tables that are open."""
        return len(self._open)

    def open(self, seq: Sequence, reserve: int) -> bool:
        """Gives `seq` blocks for all its tokens, known prefix first, and sets `computed` behind the
        prefix. At least one token stays to be computed. False, and nothing changed, when fewer
        than `reserve` blocks would be left free."""
        pool, size = self.pool, self.block_size
        length = len(seq.tokens)
        known: list[int] = []
        if self._caching and not seq.prompt_logprobs_due:
            known = self._find_prefix(seq, (length - 1) // size)
        missing = -(-length // size) - len(known)
        if pool.num_free - pool.count_unheld(known) - missing < reserve:
            return False
        pool.share(known)
        seq.blocks = known + pool.allocate(missing)
        seq.computed = len(known) * size
        seq.num_registered = len(known)
        self._open[seq] = None
        if self._caching and not seq.admitted_at:
            self._counters.prefix_queries += length
            self._counters.prefix_hits += seq.computed
            seq.num_cached_tokens = seq.computed
        return True

    def grow(self, seqs: list[Sequence]) -> None:
        """One more block for each of `seqs`; the caller has made sure that there are enough."""
        for seq, block in zip(seqs, self.pool.allocate(len(seqs)), strict=True):
            seq.blocks.append(block)
            late = len(seq.blocks) - seq.num_registered
            if late > FEW_LATE and self._caching:
                self._late[seq] = None
                if late > MOST_LATE + seq.order % MOST_LATE:
                    self.offer(seq)

    def close(self, seq: Sequence, trusted: bool = True) -> list[int]:
        """Takes its table away from `seq`. The blocks are held on, until the caller releases them.

        Not `trusted`: what `seq` computed or read must not be found by anybody any more."""
        del self._open[seq]
        if trusted:
            self.offer(seq)
        else:
            self._late.pop(seq, None)
            for block in seq.blocks:
                self.pool.forget(block)
        blocks, seq.blocks = seq.blocks, []
        return blocks

    def offer(self, seq: Sequence) -> None:
        """Tells the prefix cache of all full blocks of `seq` that every step planned from now on
        finds in place."""
        if self._caching:
            self._late.pop(seq, None)
            self._register(seq, self._num_full(seq))

    @property
    def has_late(self) -> bool:
        """Whether there is something for `offer_late` to do."""
        return bool(self._late)

    def offer_late(self) -> None:
        """Offers a few blocks that wait, for when there is time."""
        left = AT_ONCE
        while left > 0 and self._late:
            seq = next(iter(self._late))
            full, most = self._num_full(seq), seq.num_registered + left
            left -= max(1, full - seq.num_registered)
            self._register(seq, min(full, most))
            if full <= most:
                del self._late[seq]

    def _num_full(self, seq: Sequence) -> int:
        """Full blocks that are computed before any step planned from now on."""
        if seq.state is SequenceState.PREFILL:
            return seq.computed // self.block_size
        # The newest token was not fed by any answered step.
        return (len(seq.tokens) - 1) // self.block_size

    def _register(self, seq: Sequence, full: int) -> None:
        first = seq.num_registered
        if full <= first:
            return
        extend_hashes(seq.hashes, seq.tokens, self.block_size, full)
        self.pool.register(seq.blocks[first:full], seq.hashes[first:full])
        seq.num_registered = full

    def _find_prefix(self, seq: Sequence, limit: int) -> list[int]:
        """Blocks whose contents are those of the first ones of `seq`, `limit` at most.

        Where the cache knows no further, sequences that run may. One look at each is enough: after
        it everything that they have in common with `seq` is known."""
        extend_hashes(seq.hashes, seq.tokens, self.block_size, limit)
        hashes = seq.hashes[:limit]
        known = self.pool.find(hashes)
        for other in self._open:
            if len(known) == limit:
                break
            if other.num_registered <= len(known) and self._goes_on(other, seq, len(known)):
                self._register(other, min(limit, self._num_full(other)))
                known += self.pool.find(hashes[len(known) :])
        return known

    def _goes_on(self, other: Sequence, seq: Sequence, known: int) -> bool:
        """Whether `other` has computed block `known` of `seq`, and not offered it yet."""
        if self._num_full(other) <= known:
            return False
        first, size = other.num_registered, self.block_size
        if first and other.hashes[first - 1] != seq.hashes[first - 1]:
            return False
        pending = slice(first * size, (known + 1) * size)
        return other.tokens[pending] == seq.tokens[pending]
