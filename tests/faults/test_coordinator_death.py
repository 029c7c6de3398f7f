"""The coordinator is killed: the first keeper starts it again at its address, clients go on.

All requests are under way when it dies, one or more for every kind of sampling parameter."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.faults.fault_server import FaultServer, fault_server, serve, wait_for
from tests.faults.http_stream import PROMPT, http_stream
from tests.tiny_models import make_tiny
from tp_runtime import (
    LLM,
    Client,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TokenStream,
)
from tp_runtime.errors import ServerUnavailableError, TPRuntimeError

MAX_TOKENS = 110
KILL_AFTER = 8
"""Tokens that each request has when the coordinator dies."""
FLAGS = ("--step-deadline", os.environ.get("FAULT_STEP_DEADLINE", "3"), "--http", "--port", "0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    with fault_server(tmp_path_factory.mktemp("server"), *serve(tiny, *FLAGS)) as server:
        yield server


def sampling_cases(greedy: RequestOutput) -> dict[str, dict[str, Any]]:
    """`greedy` is the undisturbed answer to PROMPT, from which stop conditions are taken."""
    ids, text = greedy.token_ids, greedy.text
    return {
        "greedy": {},
        "seed given": {"temperature": 1.0, "seed": 3},
        "top_k top_p min_p": {
            "temperature": 0.9, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.01,
        },
        "repetition penalty": {"repetition_penalty": 1.3},
        "presence and frequency penalties": {
            "temperature": 1.0, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3,
        },
        "logit bias": {"temperature": 1.0, "seed": 6, "logit_bias": {ids[3]: -5.0, 60: 3.0}},
        "min_tokens": {
            "temperature": 1.0, "seed": 9, "min_tokens": 50, "stop_token_ids": sorted(set(ids)),
        },
        "stop string": {"stop": [text[70:74]], "include_stop_str_in_output": True},
        "text held back": {"stop": [text[3:100] + "#"]},
        "logprobs": {"logprobs": 3, "temperature": 1.0, "seed": 7},
        "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
        "several samples": {"temperature": 1.0, "seed": 8, "n": 3},
        "grammar": {
            "temperature": 1.0, "seed": 10, "n": 2,
            "structured_outputs": StructuredOutputsParams(regex="([a-z]{1,9} ){30,60}"),
        },
    }  # fmt: skip


def params(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "ignore_eos": True, "max_tokens": MAX_TOKENS} | fields
    )


def start(client: Client, cases: dict[str, dict[str, Any]]) -> dict[str, TokenStream]:
    return {
        name: client.generate(PROMPT, params(fields), stream=True, timeout=90)
        for name, fields in cases.items()
    }


class KilledRun:
    """What clients got from the run in which the coordinator died, and without that."""

    def __init__(self, server: FaultServer) -> None:
        with Client(server.address) as client:
            greedy = client.generate(PROMPT, params({}))
            cases = sampling_cases(greedy)
            self.wanted = {name: finish(stream)[0] for name, stream in start(client, cases).items()}
            self.before = server.coordinator, server.workers()
            streams = start(client, {**cases, "seed drawn": {"temperature": 1.0}})
            begun = {name: [next(s) for _ in range(KILL_AFTER)] for name, s in streams.items()}
            os.kill(server.coordinator.pid, signal.SIGKILL)
            killed = time.monotonic()
            self.found, self.streamed = {}, {}
            for name, stream in streams.items():
                self.found[name], rest = finish(stream)
                self.streamed[name] = begun[name] + rest
            self.seconds = time.monotonic() - killed
            drawn = self.found["seed drawn"].seed
            again = params({"temperature": 1.0, "seed": drawn})
            self.wanted["seed drawn"] = client.generate(PROMPT, again)


def finish(stream: TokenStream) -> tuple[RequestOutput, list[Any]]:
    chunks = list(stream)
    return stream.output, chunks


@pytest.fixture(scope="module")
def run(server):
    return KilledRun(server)


NAMES = [
    "greedy", "seed given", "seed drawn", "top_k top_p min_p", "repetition penalty",
    "presence and frequency penalties", "logit bias", "min_tokens", "stop string",
    "text held back", "logprobs", "prompt logprobs", "several samples",
    "grammar",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_request_goes_on_at_its_next_token(run, name):
    found, wanted = run.found[name], run.wanted[name]
    assert found.prompt_logprobs == wanted.prompt_logprobs
    for index, (a, b) in enumerate(zip(found.outputs, wanted.outputs, strict=True)):
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert len(a.token_ids) > KILL_AFTER
        same_logprobs(a.logprobs, b.logprobs)
        mine = [chunk for chunk in run.streamed[name] if chunk.index == index]
        assert [i for chunk in mine for i in chunk.token_ids] == b.token_ids
        assert "".join(chunk.text for chunk in mine) == b.text


def same_logprobs(found: Any, wanted: Any) -> None:
    """The last bits may differ: a prefill adds up in another order than decode steps."""
    assert (found is None) == (wanted is None)
    for a, b in zip(found or [], wanted or [], strict=True):
        assert a.chosen.token_id == b.chosen.token_id
        assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
        assert [x.token_id for x in a.top] == [x.token_id for x in b.top]


def test_min_tokens_and_stops_were_met(run):
    assert 50 < len(run.found["min_tokens"].token_ids) < MAX_TOKENS
    assert run.found["stop string"].finish_reason == "stop"
    held = run.streamed["text held back"]
    assert sum(len(chunk.text) for chunk in held[:KILL_AFTER]) <= 3


def test_the_next_coordinator_has_the_same_address_new_workers_and_no_failure(server, run):
    coordinator, workers = run.before
    assert not coordinator.alive()
    assert server.coordinator.alive()
    assert server.folder.read_server().address == server.address
    assert server.folder.read_failure() is None
    assert not any(worker.alive() for worker in workers)
    assert len(server.workers()) == 2


def test_a_stream_over_http_goes_on_too(server):
    server.wait_ready()
    wanted = "".join(http_stream(server, MAX_TOKENS))
    stream = http_stream(server, MAX_TOKENS)
    text = "".join(next(stream) for _ in range(5))
    os.kill(server.coordinator.pid, signal.SIGKILL)
    assert text + "".join(stream) == wanted
    assert len(wanted) > MAX_TOKENS / 2


def test_without_reconnection_the_error_comes_within_a_second(server):
    server.wait_ready()
    with Client(server.address, reconnect=False) as client:
        stream = client.generate(PROMPT, params({"max_tokens": 200}), stream=True)
        next(stream)
        os.kill(server.coordinator.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(ServerUnavailableError):
            list(stream)
        assert time.monotonic() - killed < 1.0


@pytest.mark.faults
def test_a_fault_of_the_coordinator_itself_is_no_end(server):
    server.wait_ready()
    with Client(server.address) as client:
        wanted = client.generate(PROMPT, params({})).token_ids
        stream = client.generate(PROMPT, params({}), stream=True)
        next(stream)
        wait_for(server.plan("coordinator", "tick", "raise"), 10)
        list(stream)
        assert stream.output.token_ids == wanted


@pytest.mark.faults
def test_a_stopped_coordinator_is_replaced(server):
    server.wait_ready()
    with Client(server.address) as client:
        wanted = client.generate(PROMPT, params({})).token_ids
        stream = client.generate(PROMPT, params({}), stream=True)
        next(stream)
        os.kill(server.coordinator.pid, signal.SIGSTOP)
        list(stream)
        assert stream.output.token_ids == wanted


@pytest.mark.faults
def test_llm_goes_on_too(tiny):
    with LLM(tiny, device="cpu", max_model_len=256, num_kv_blocks=64) as llm:
        wanted = llm.client.generate(PROMPT, params({})).token_ids
        pending = llm.client.submit(PROMPT, params({"max_tokens": 200}))
        wait_for(lambda: pending.num_tokens > 0, 20)
        before = llm._server.folder.read_coordinator()
        os.kill(before.pid, signal.SIGKILL)
        assert pending.result(60).token_ids[:MAX_TOKENS] == wanted
        assert llm._server.folder.read_coordinator() != before


@pytest.mark.faults
def test_a_coordinator_that_dies_too_often_is_given_up_with_a_typed_error(tiny, tmp_path):
    command = serve(tiny, "--max-worker-restarts", "1", ranks=1)
    with fault_server(tmp_path, *command) as server, Client(server.address) as client:
        os.kill(server.coordinator.pid, signal.SIGKILL)
        client.generate(PROMPT, params({}), timeout=60)
        stream = client.generate(PROMPT, params({"max_tokens": 200}), stream=True)
        next(stream)
        os.kill(server.coordinator.pid, signal.SIGKILL)
        with pytest.raises(TPRuntimeError, match="2 times within"):
            list(stream)
        assert server.program.wait(10) != 0
        server.program.assert_all_gone()
