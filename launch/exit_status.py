"""Exit statuses of the processes in this folder.

Under `tp-runtime serve` a keeper ends with 0 whenever it did as told, also after a failure that is
recorded in the run folder: torch's elastic agent starts keepers again for any other status, and a
failure of the server is not mended by that. The launcher reads the record and exits with FAILED.
Under plain torchrun a keeper's status is the server's.
"""

from __future__ import annotations

OK = 0
"""Stopped as asked."""
FAILED = 1
"""The server could not go on; the first cause was printed."""
REFUSED = 2
"""A flag, setting or model folder that cannot work; nothing was started."""
COORDINATOR_LOST = 3
"""Keeper: the coordinator's socket closed without a word. Relay: its connection ended so."""
LAUNCHER_LOST = 4
"""Keeper: the process that started it is gone."""
NOT_FORKABLE = 5
"""Keeper: it holds threads or a GPU and must not fork a worker."""


def of_signal(signum: int) -> int:
    """The shell's convention for a process ended by a signal."""
    return 128 + signum
