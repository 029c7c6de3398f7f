"""The doors of a coordinator: where keepers and relays come in, and what is known of them."""

from __future__ import annotations

from typing import NamedTuple

from tp_runtime.coordinator.relay_door import RelayDoor
from tp_runtime.messages import KeeperMessage
from tp_runtime.transport.fd_socket import FdListener


class Doors(NamedTuple):
    """Where keepers come in: those of this host, which are ranks 0 .. `local_ranks` - 1, and
    through relays those of the others."""

    keepers: FdListener[KeeperMessage]
    local_ranks: int
    relays: RelayDoor | None = None
    keeper_restarts: int | None = None
    """How often the launcher starts lost keepers again; None: not known, so it is waited for."""
    first_generation: int = 1
    """Not 1: there was a coordinator before, which died, and the server did work."""
