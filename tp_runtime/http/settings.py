"""Where the HTTP server listens, and the listening socket, bound before anything else starts."""

from __future__ import annotations

import errno
import ipaddress
import socket
import time

import msgspec

from tp_runtime.errors import ConfigError, TPRuntimeError

BACKLOG = 1024
_RETRY_S = 0.05


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`port` 0: the system chooses one. `api_key` empty: everybody who can connect may ask."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""

    @property
    def open_to_others(self) -> bool:
        """Other hosts can connect and need no key."""
        return not self.api_key and not _is_loopback(self.host)


def bind(settings: HttpSettings, patience_s: float = 0.0) -> socket.socket:
    """A socket that listens at the address.

    `patience_s`: how long a taken port may take to become free (a process that was ended a moment
    ago). Raises ConfigError for an address that is none, TPRuntimeError for a port that is
    taken; both are one sentence."""
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"--port {settings.port} is out of range; give 0 to 65535.")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _listen(settings)
        except socket.gaierror as error:
            raise ConfigError(
                f"--host {settings.host} is not an address of this machine ({error.strerror})."
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
                continue
            raise _refusal(settings, error) from error


def url_of(listening: socket.socket) -> str:
    """`http://host:port` of a bound socket, as a program on this machine can use it."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(settings: HttpSettings) -> socket.socket:
    found = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _refusal(settings: HttpSettings, error: OSError) -> TPRuntimeError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return TPRuntimeError(
            f"Port {settings.port} of {settings.host} is taken; give another with --port (0 takes "
            "any free one), or --no-http."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return TPRuntimeError(f"This user may not listen at {where}; give a --port above 1023.")
    return ConfigError(f"Cannot listen at {where} ({error.strerror}); check --host and --port.")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
