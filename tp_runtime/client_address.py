"""What a client finds out about servers of this user on this machine through their run folders.

Run folders are imported where they are used: most programs that import `Client` name an address,
and the import is a fifth of the whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError, ServerUnavailableError

if TYPE_CHECKING:
    from tp_runtime.run_folder import RunFolder


def find_server() -> str:
    """The address of the only running server of this user on this host.

    Raises ServerUnavailableError when there is none, and with all addresses when there are
    several."""
    from tp_runtime.run_folder import list_servers

    servers = list_servers()
    if not servers:
        raise ServerUnavailableError(
            "No server of yours runs on this machine; start one with `tp-runtime serve MODEL` or "
            "give the address of one elsewhere."
        )
    if len(servers) > 1:
        listed = ", ".join(f"{server.address} ({server.model})" for server in servers)
        raise ServerUnavailableError(
            f"{len(servers)} servers of yours run on this machine; give the address of one of "
            f"them: {listed}."
        )
    return servers[0].address


def find_home(address: str) -> RunFolder | None:
    """The run folder of the server at this address, None when it is not one of this machine."""
    from tp_runtime.run_folder import RunFolder, run_root

    if address.startswith("ipc://"):
        folder = RunFolder(os.path.dirname(address.removeprefix("ipc://")))
        return folder if folder.read_server() is not None else None
    try:
        folders = [RunFolder(path) for path in run_root().iterdir() if path.is_dir()]
    except (ConfigError, OSError):
        return None
    for folder in folders:
        server = folder.read_server()
        if server is not None and server.address == address:
            return folder
    return None


def is_over(home: RunFolder) -> bool:
    """Whether the server of this folder will not come back: it has left word why, or put away what
    announced it, or the process that would start its coordinator again is gone."""
    return home.read_failure() is not None or home.read_server() is None or not home.owner_alive()
