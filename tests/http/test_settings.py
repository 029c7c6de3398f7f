"""Where the HTTP server may listen, and the sentences when it may not."""

from __future__ import annotations

import socket
import threading

import pytest

from tp_runtime.errors import ConfigError, TPRuntimeError
from tp_runtime.http.settings import HttpSettings, bind, url_of


def test_port_zero_takes_a_free_one_on_loopback():
    with bind(HttpSettings(port=0)) as listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        assert url_of(listening) == f"http://127.0.0.1:{port}"
        socket.create_connection((host, port)).close()


def test_a_taken_port_is_one_sentence_that_names_the_flag():
    with bind(HttpSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TPRuntimeError, match=f"Port {port} .* is taken; .*--port") as refusal:
            bind(HttpSettings(port=port))
        assert not isinstance(refusal.value, ConfigError)  # exit status 1, not 2
    bind(HttpSettings(port=port)).close()


def test_patience_waits_for_a_port_that_becomes_free():
    taken = bind(HttpSettings(port=0))
    port = taken.getsockname()[1]
    timer = threading.Timer(0.2, taken.close)
    timer.start()
    bind(HttpSettings(port=port), patience_s=10.0).close()
    timer.join()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (HttpSettings(port=70000), "--port 70000"),
        (HttpSettings(host="no such host"), "--host"),
        (HttpSettings(host="192.0.2.1", port=0), "--host"),  # TEST-NET-1, nobody's
    ],
)
def test_an_address_that_cannot_be_is_refused_by_flag(settings, words):
    with pytest.raises(ConfigError, match=words):
        bind(settings)


@pytest.mark.parametrize(
    ("host", "key", "open_"),
    [
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("::1", "", False),
        ("0.0.0.0", "", True),
        ("gpu-host", "", True),
        ("0.0.0.0", "secret", False),
    ],
)
def test_only_other_hosts_without_a_key_are_a_danger(host, key, open_):
    assert HttpSettings(host=host, api_key=key).open_to_others is open_
