"""The token ids that mean something beside being the next token."""

from __future__ import annotations

from tp_runtime.coordinator.sequence import Sequence

NOT_FINITE = -1
"""In place of a sampled id: the row's logits held NaN or plus infinity."""


class WatchedIds:
    """The ids that end at least one of the admitted sequences, and NOT_FINITE."""

    def __init__(self) -> None:
        self._users: dict[frozenset[int], int] = {}
        self.ids: frozenset[int] = frozenset((NOT_FINITE,))

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

    @property
    def nobody(self) -> bool:
        """No sequence has an end id."""
        return len(self.ids) == 1

    @property
    def num_users(self) -> int:
        return sum(self._users.values())

    def _rebuild(self) -> None:
        self.ids = frozenset((NOT_FINITE,)).union(*self._users)
