"""Which server a client means when it is given no address: the only one of this user here."""

from __future__ import annotations

from tp_runtime.errors import ServerUnavailableError
from tp_runtime.run_folder import list_servers


def find_server() -> str:
    """The address of the only running server of this user on this host.

    Raises ServerUnavailableError when there is none, and with all addresses when there are
    several."""
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
