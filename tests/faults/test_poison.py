"""A request that takes the workers along every time: it alone fails, everybody else goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.fault_server import fault_server
from tests.launch.processes import SMALL, TP_RUNTIME
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.errors import RequestFailedError

OTHERS = 63
FIELDS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30}


def ask(client: Client, i: int):
    sampling: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}
    return client.submit([10 + i, 11, 12 + i % 5], timeout=120, **sampling, **FIELDS)


@pytest.mark.parametrize("action", ["abort", pytest.param("kill", marks=pytest.mark.faults)])
def test_only_the_poisonous_request_fails(tmp_path, action):
    tiny = str(make_tiny("qwen3", tmp_path / "tiny"))
    command = (*TP_RUNTIME, "serve", tiny, "-tp", "2", *SMALL)  # three restarts, as by default
    with (
        fault_server(tmp_path, *command) as server,
        Client(server.address, timeout=120) as client,
    ):
        running = [ask(client, i) for i in range(OTHERS)]
        wanted = [pending.result(60).token_ids for pending in running]
        token = next(i for i in range(100, 200) if all(i not in ids for ids in wanted))
        (server.faults / "poison").write_text(f"1 {token} {action}")

        running = [ask(client, i) for i in range(OTHERS // 2)]
        poisonous = client.submit([5, token, 6], temperature=0, timeout=120, **FIELDS)
        running += [ask(client, i) for i in range(OTHERS // 2, OTHERS)]
        with pytest.raises(RequestFailedError, match="crashed three times"):
            poisonous.result(100)
        assert [pending.result(100).token_ids for pending in running] == wanted
        assert client.info().stats["worker_restarts"] == (3 if action == "abort" else 4)
        assert client.info().state == "ready"
