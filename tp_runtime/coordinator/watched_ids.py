"""The token ids that mean something beside being the next token."""

from __future__ import annotations

from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.messages import pack_ids

NOT_FINITE = -1
"""In place of a sampled id: the row's logits held NaN or plus infinity."""


class WatchedIds:
    """The ids that end at least one of the admitted sequences, and NOT_FINITE."""

    def __init__(self) -> None:
        self._users: dict[frozenset[int], int] = {}
        self.ids: frozenset[int] = frozenset((NOT_FINITE,))
        self._packed: tuple[bytes, ...] = ()

    def add(self, seq: Sequence) -> None:
        users = self._users.get(seq.end_ids, 0)
        self._users[seq.end_ids] = users + 1
        if not users:
            self._rebuild()

    def remove(self, seq: Sequence) -> None:
        users = self._users[seq.end_ids] - 1
        if users:
            self._users[seq.end_ids] = users
        else:
            del self._users[seq.end_ids]
            self._rebuild()

    def maybe_in(self, ids: bytes) -> bool:
        """False when none of the packed ids ends anybody. Bytes of two neighbours can look like an
        end id, so True says only that they have to be read one by one."""
        return any(each in ids for each in self._packed)

    @property
    def num_users(self) -> int:
        return sum(self._users.values())

    def _rebuild(self) -> None:
        ends = frozenset[int]().union(*self._users)
        self.ids = ends | {NOT_FINITE}
        self._packed = tuple(pack_ids((token_id,)) for token_id in ends)
