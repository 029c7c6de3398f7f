"""One server over two network namespaces joined by a virtual cable, which is then cut.

The nearest thing to two hosts that one machine has: the two share no loopback, no port and no
interface. Needs root and the program `ip`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.launch.processes import SMALL, program
from tests.launch.test_several_hosts import (
    ENTRY,
    GREEDY,
    LONG,
    PROMPTS,
    wait_ready,
)
from tests.tiny_models import make_tiny
from tp_runtime import Client, TPRuntimeError


def ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, timeout=20)


class Namespace(NamedTuple):
    name: str
    cable: str
    address: str


@pytest.fixture
def namespaces() -> Iterator[list[Namespace]]:
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("network namespaces need root and the program ip")
    mark = f"{os.getpid() % 100_000}"
    made = [
        Namespace(f"tpr{mark}{x}", f"v{mark}{x}", f"10.213.7.{i}") for i, x in ((1, "a"), (2, "b"))
    ]
    a, b = made
    with contextlib.ExitStack() as stack:
        try:
            for space in made:
                ip("netns", "add", space.name)
                stack.callback(ip, "netns", "del", space.name)
            ip("link", "add", a.cable, "type", "veth", "peer", "name", b.cable)
            for space in made:
                ip("link", "set", space.cable, "netns", space.name)
                inside = ("netns", "exec", space.name, "ip")
                ip(*inside, "addr", "add", f"{space.address}/24", "dev", space.cable)
                ip(*inside, "link", "set", space.cable, "up")
                ip(*inside, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield made


@pytest.mark.faults
def test_a_server_over_two_networks_and_a_cut_cable_is_a_typed_error_in_five_seconds(
    namespaces, tmp_path
):
    tiny = str(make_tiny("qwen3", tmp_path / "tiny"))
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint={namespaces[0].address}:29500", "--rdzv-id=t")

    def command(space: Namespace) -> tuple[str, ...]:
        inside = ("ip", "netns", "exec", space.name, sys.executable, "-m", "torch.distributed.run")
        # torchrun knows an endpoint for its own by the host's name, which both have in common here.
        own = f"--rdzv-conf=is_host={int(space is namespaces[0])}"
        hosts = ("--nnodes=2", "--nproc-per-node=1", f"--local-addr={space.address}", own)
        return (*inside, *hosts, *meet, *ENTRY, tiny, *SMALL)

    a, b = namespaces
    with (
        program(tmp_path / "a", *command(a)) as first,
        program(tmp_path / "b", *command(b)) as second,
    ):
        leader = wait_ready(first, second)
        address = leader.wait_ready(1).address
        with Client(address, reconnect=False) as client:
            assert len(client.generate(PROMPTS[0], GREEDY).token_ids) == GREEDY.max_tokens
            stream = client.generate(PROMPTS[0], LONG, stream=True)
            next(stream)
            started = time.monotonic()
            ip("netns", "exec", a.name, "ip", "link", "set", a.cable, "down")
            with pytest.raises(TPRuntimeError, match=r"its host .* is lost"):
                list(stream)
            assert time.monotonic() - started < 5.0
        # What is left of either host is its torchrun, which gives up in its own time.
        deadline = time.monotonic() + 15.0
        while time.monotonic() < deadline:
            left = [c for p in (first, second) for c in p.left() if "tp_runtime" in c]
            left = [c for c in left if "torch.distributed.run" not in c]
            if not left:
                break
            time.sleep(0.1)
        assert left == []
