"""The block tables of sequences: given at admission, grown while decoding, shared by content.

Joins the pool (numbers), the hashes (contents) and the sequences (tables). When blocks may be let
go is decided by the scheduler, which knows the steps under way.
"""

from __future__ import annotations

from tp_runtime.coordinator.block_pool import BlockPool
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.prefix_hash import extend_hashes
from tp_runtime.coordinator.scheduler_stats import SchedulerCounters
from tp_runtime.coordinator.sequence import Sequence


class BlockTables:
    """Owns the pool."""

    def __init__(self, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.block_size = limits.block_size
        self._caching = limits.enable_prefix_caching
        self._counters = counters

    def open(self, seq: Sequence, reserve: int) -> bool:
        """Gives `seq` blocks for all its tokens, known prefix first, and sets `computed` behind the
        prefix. At least one token stays to be computed. False, and nothing changed, when fewer
        than `reserve` blocks would be left free."""
        pool, size = self.pool, self.block_size
        length = len(seq.tokens)
        known: list[int] = []
        if self._caching and not seq.prompt_logprobs_due:
            known = pool.find(seq.hashes[: (length - 1) // size])
        missing = -(-length // size) - len(known)
        if pool.num_free - pool.count_unheld(known) - missing < reserve:
            return False
        pool.share(known)
        seq.blocks = known + pool.allocate(missing)
        seq.computed = len(known) * size
        seq.num_registered = len(known)
        if self._caching and not seq.admitted_at:
            self._counters.prefix_queries += length
            self._counters.prefix_hits += seq.computed
            seq.num_cached_tokens = seq.computed
        return True

    def grow(self, seqs: list[Sequence]) -> None:
        """One more block for each of `seqs`; the caller has made sure that there are enough."""
        for seq, block in zip(seqs, self.pool.allocate(len(seqs)), strict=True):
            seq.blocks.append(block)

    def register(self, seq: Sequence, computed: int) -> None:
        """Offers the full blocks among the first `computed` positions to the prefix cache: their
        ids are known, and every step planned from now on finds their K and V in place."""
        if not self._caching:
            return
        full = computed // self.block_size
        if full <= seq.num_registered:
            return
        if len(seq.hashes) < full:
            extend_hashes(seq.hashes, seq.tokens, self.block_size)
        for index in range(seq.num_registered, full):
            self.pool.register(seq.blocks[index], seq.hashes[index])
        seq.num_registered = full

    def forget(self, seq: Sequence) -> None:
        """What `seq` computed or read is not to be trusted; nobody may find it any more."""
        for block in seq.blocks:
            self.pool.forget(block)
        seq.num_registered = len(seq.blocks)
