"""Which address to listen at, so that other hosts can reach it."""

from __future__ import annotations

import socket

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.launch import network


def test_loopback_is_kept_only_where_it_was_meant(monkeypatch):
    assert network.listening_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(network, "resolve", lambda host: "127.0.1.1")
    assert network.listening_address("localhost") == "127.0.1.1"
    assert network.listening_address("node1") == "0.0.0.0"  # a host's own name in /etc/hosts
    assert network.interface_towards("node1") is None
    monkeypatch.setattr(network, "resolve", lambda host: "10.1.2.3")
    assert network.listening_address("node1") == "10.1.2.3"


def test_the_interface_of_loopback_is_found_by_its_address():
    assert network.interface_towards("127.0.0.1") == "lo"


def test_an_unknown_name_is_an_error_that_says_what_to_give(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="--local-addr"):
        network.resolve("node1")
    assert network.interface_towards("node1") is None
