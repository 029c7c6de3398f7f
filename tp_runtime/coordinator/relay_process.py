"""The process of a relay (see coordinator.relay), started by the first keeper of its host.

    python -m tp_runtime.coordinator.relay_process --config JSON --run-dir DIR --watch-pid PID
        --coordinator-host HOST --first-rank N --local-ranks N

It runs in a session of its own, loads no torch, and ends with the process it watches. How to reach
the coordinator it reads in the run folder, where launch.door_exchange puts it.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from tp_runtime.coordinator.relay import COORDINATOR_LOST, Relay
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ServerUnavailableError, TPRuntimeError
from tp_runtime.messages import KeeperMessage
from tp_runtime.run_folder import DoorKey, RunFolder
from tp_runtime.transport.fd_socket import FdListener
from tp_runtime.transport.signal_pipe import SignalPipe

_LOOK_S = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 stopped as asked, 1 otherwise (the cause is in failure.json). Does
    not return when the coordinator was lost; the first keeper then starts another relay."""
    parser = argparse.ArgumentParser(prog="tp_runtime.relay", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--run-dir", required=True, help="run folder of this host")
    parser.add_argument("--watch-pid", type=int, required=True, help="end with this process")
    parser.add_argument("--coordinator-host", required=True, help="its address, as seen from here")
    parser.add_argument("--first-rank", type=int, required=True, help="first rank of this host")
    parser.add_argument("--local-ranks", type=int, required=True, help="ranks of this host")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="tp_runtime: %(message)s", stream=sys.stderr)
    folder = RunFolder(given.run_dir)
    try:
        launcher = os.pidfd_open(given.watch_pid)
    except ProcessLookupError:
        return 1
    try:
        config = EngineConfig.from_json(given.config)
        ranks = range(given.first_rank, given.first_rank + given.local_ranks)
        status = _relay(config, ranks, given.coordinator_host, folder, launcher)
        if status == COORDINATOR_LOST:
            os._exit(status)  # what is in the run folder is for the next one
        return status
    except TPRuntimeError as error:
        folder.write_failure(error.code, str(error))
        return 1
    except Exception as error:
        trace = traceback.format_exc()
        folder.write_failure("error", f"The relay failed ({error!r}).\n{trace}")
        return 1
    finally:
        folder.close()


def _relay(config: EngineConfig, ranks: range, host: str, folder: RunFolder, launcher: int) -> int:
    listener: FdListener[KeeperMessage] = FdListener(folder.keepers_socket, KeeperMessage)
    try:
        signals = SignalPipe({signal.SIGTERM, signal.SIGINT})
        folder.write_status("starting", f"waiting for the coordinator's address from {host}")
        key = _wait_for_key(folder, launcher, signals, config.start_timeout_s)
        if key is None:
            return 0
        return Relay(config, ranks, host, key, listener, folder, launcher, signals).run()
    finally:
        listener.close()


def _wait_for_key(
    folder: RunFolder, launcher: int, signals: SignalPipe, timeout_s: float
) -> DoorKey | None:
    """None when the launcher is gone or a signal came. Raises the recorded failure, or
    ServerUnavailableError after `timeout_s`."""
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while (key := folder.read_door()) is None:
        if poll.poll(_LOOK_S * 1000):
            return None
        failure = folder.read_failure()
        if failure is not None:
            raise failure.error()
        if time.monotonic() > deadline:
            raise ServerUnavailableError(
                f"The first host published no coordinator within {timeout_s:g} s; look at the "
                "output of its torchrun."
            )
    return key


if __name__ == "__main__":
    sys.exit(main())
