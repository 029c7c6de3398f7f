"""The way of the coordinator's door key from the first host to the relays: torchrun's store.

The store is the one place that all hosts know before they know each other. Its client runs threads,
so a keeper must not hold one; a child forked from the first keeper of each host, which has imported
torch, uses it once and ends. On the coordinator's host the child takes the key from the run folder
and publishes it; elsewhere it waits for the key and puts it into the run folder, for the relay.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from tp_runtime.errors import ServerUnavailableError
from tp_runtime.launch.parent_death import die_with_parent
from tp_runtime.launch.rank_environment import RankPlace
from tp_runtime.run_folder import DoorKey, RunFolder

_LOOK_S = 0.02
STORE_S = 2.0
"""A store that does not answer for so long, after a coordinator was lost, went with its host."""


class DoorExchange:
    """The child. Make it before anything is open that a child must not inherit, or say with
    `close_in_child` how that is closed. `number`: the coordinator that it is about, 1 for the first
    one; all hosts count alike, because a relay ends with its coordinator."""

    def __init__(
        self,
        folder: RunFolder,
        place: RankPlace,
        timeout_s: float,
        number: int = 1,
        close_in_child: Callable[[], None] = lambda: None,
    ) -> None:
        keeper = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                if die_with_parent(keeper):
                    close_in_child()
                    _exchange(folder, place, timeout_s, number)
            except BaseException as error:
                _record(folder, error)
            finally:
                os._exit(0)

    def ended(self) -> bool:
        """Whether it has done its work and been reaped; never blocks."""
        return os.waitpid(self._pid, os.WNOHANG)[0] != 0


def _exchange(folder: RunFolder, place: RankPlace, timeout_s: float, number: int) -> None:
    from torch.distributed import TCPStore

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ServerUnavailableError(
            "torchrun shares no store with its ranks, through which the hosts could find each "
            "other; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE."
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = f"tp_runtime/door/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    keys = [key] if number == 1 else [key, f"{key}/{number}"]
    if number > 1:
        socket.create_connection((host, port), STORE_S).close()  # the store waits much longer
    deadline, timeout = time.monotonic() + timeout_s, datetime.timedelta(seconds=timeout_s)
    if place.coordinates:
        while (door := folder.read_door()) is None:
            if time.monotonic() > deadline or folder.read_failure() is not None:
                return  # the keeper tells why
            time.sleep(_LOOK_S)
        store = TCPStore(host, port, timeout=timeout)
        for name in keys:
            store.set(name, msgspec.json.encode(door).decode())
    else:
        found = TCPStore(host, port, timeout=timeout).get(keys[-1])
        folder.write_door(msgspec.json.decode(found, type=DoorKey))


def _record(folder: RunFolder, error: BaseException) -> None:
    if not isinstance(error, ServerUnavailableError):
        traceback.print_exc()
    folder.write_failure(
        ServerUnavailableError.code,
        f"The hosts could not find each other through torchrun's store: {error}",
    )
