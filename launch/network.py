"""Which address and which network interface of this host lead to another one."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from tp_runtime.errors import ConfigError

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def resolve(host: str) -> str:
    """The first address of a host name, IPv4 first. Raises ConfigError when it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"The host name {host!r} (MASTER_ADDR) has no address here ({error}); give torchrun "
            "--local-addr with an address that the other hosts can reach."
        ) from error
    addresses = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(addresses[0][4][0])


def listening_address(host: str) -> str:
    """Where to listen on this host, which others know as `host`.

    Some systems give the host's own name a loopback address (127.0.1.1 in /etc/hosts), under which
    no other host reaches it; then, unless loopback was meant, it is every interface."""
    address = resolve(host)
    meant = host == "localhost" or _is_loopback(host)
    return "0.0.0.0" if _is_loopback(address) and not meant else address


def own_address_towards(host: str) -> str | None:
    """The address of this host from which packets to `host` leave; None when it has no route."""
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket sends nothing on connect
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Name of the interface that has that address (IPv4); None when it cannot be told.

    A loopback address under a name of this host says nothing about the way from other hosts."""
    try:
        own = own_address_towards(host)
    except ConfigError:
        return None
    if own is None or (_is_loopback(own) and host != "localhost" and not _is_loopback(host)):
        return None
    for _, name in socket.if_nameindex():
        if _address_of(name) == own:
            return name
    return None


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:_NAME_BYTES])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None  # it has no IPv4 address
    return socket.inet_ntoa(answer[20:24])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
