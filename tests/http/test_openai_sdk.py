"""The openai SDK against a real server of two CPU workers: what people's programs do.

One server for the module: a tiny random model, so texts are noise and everything else is real.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.http.api_server import wait_healthy
from tests.launch.processes import ROOT, SMALL, TORCHRUN, TP_RUNTIME, Program, program
from tests.tiny_models import make_tiny
from tp_runtime import Client
from tp_runtime.launch import exit_status
from tp_runtime.run_folder import ProcessId

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[Program]:
    command = (*TP_RUNTIME, "serve", tiny, "-tp", "2", *SMALL, "--http", "--port", "0")
    with program(tmp_path_factory.mktemp("server") / "out", *command) as running:
        running.wait_ready(120)
        yield running


@pytest.fixture(scope="module")
def url(server: Program) -> str:
    return server.folders()[0].read_http()


@pytest.fixture
def sdk(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def own(server: Program) -> Iterator[Client]:
    """Our client at the same server: what the answers must agree with."""
    with Client(server.wait_ready().address) as client:
        yield client


def test_the_ready_line_tells_the_url(server, url):
    server.wait_for(f"{url}/v1")


def test_models(sdk):
    (model,) = sdk.models.list().data
    assert model.id == "tiny"
    assert sdk.models.retrieve("tiny").id == "tiny"


def test_completions_are_those_of_the_client(sdk, own):
    answer = sdk.completions.create(model="tiny", prompt="The quick", logprobs=3, **GREEDY)
    wanted = own.generate("The quick", logprobs=3, **GREEDY)
    (choice,) = answer.choices
    assert choice.text == wanted.text
    assert choice.finish_reason == wanted.finish_reason
    assert choice.logprobs.token_logprobs == [t.chosen.logprob for t in wanted.logprobs]
    assert answer.usage.completion_tokens == len(wanted.token_ids)


def test_echo_scores_a_text_as_prompt_logprobs_do(sdk, own):
    """What lm-eval asks for: the log-likelihood of given ids."""
    ids = own.tokenize("The quick brown fox")
    answer = sdk.completions.create(
        model="tiny", prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    wanted = own.generate(prompt_token_ids=ids, prompt_logprobs=1, max_tokens=1, temperature=0)
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert len(scores) == len(ids) + 1
    expected = [t.chosen.logprob for t in wanted.prompt_logprobs[1:]]
    assert scores[1:-1] == pytest.approx(expected, abs=1e-4)  # in other batches other last bits


def test_a_chat_streamed_is_the_chat_as_a_whole(sdk):
    whole = sdk.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY
    )
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    stream = sdk.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_extra_fields_pass_through_extra_body(sdk, own):
    extra = {"top_k": 5, "min_p": 0.01, "ignore_eos": True, "min_tokens": 2}
    answer = sdk.chat.completions.create(
        model="tiny", messages=HELLO, seed=7, max_tokens=8, extra_body=extra
    )
    wanted = own.chat(HELLO, seed=7, max_tokens=8, **extra)
    assert answer.choices[0].message.content == wanted.text


def test_asyncio_runs_many_at_once(url):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=HELLO, seed=seed, max_tokens=10, stream=True
                )
                parts = [c.choices[0].delta.content or "" async for c in stream]
                return "".join(parts)

            return await asyncio.gather(*(one(seed % 4) for seed in range(16)))

    texts = asyncio.run(main())
    for seed in range(4):  # the same seed, the same text, whatever runs beside it
        assert len(set(texts[seed::4])) == 1
    assert len(set(texts)) > 1


def test_errors_are_the_sdks_own_types(sdk):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature") as refusal:
        sdk.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert refusal.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="no room to generate"):
        sdk.completions.create(model="tiny", prompt="word " * 2000)
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        sdk.chat.completions.create(model="tiny", messages=HELLO, tools=[tool])


@pytest.mark.parametrize("number", range(5))
def test_examples_of_the_api_page_run_as_printed(url, number, capsys):
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    exec(compile(blocks[number].replace("http://127.0.0.1:8000", url), "http-api.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_leaving_a_stream_frees_its_place(sdk, own):
    with sdk.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    for _ in range(200):
        if own.info().stats["num_requests_running"] == 0:
            return
    raise AssertionError(own.info().stats)


def test_metrics_carry_vllms_suffixes(url):
    page = httpx.get(f"{url}/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_hits_total",
    ):
        assert f"tp_runtime:{name}{{" in page, name


def http_process(server: Program) -> ProcessId:
    server.watch()
    (found,) = [
        process
        for process in server.seen
        if process.alive() and b"tp_runtime.http\0" in command_line(process)
    ]
    return found


def command_line(process: ProcessId) -> bytes:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_the_server_survives_its_http_process(server, url):
    first = http_process(server)
    os.kill(first.pid, signal.SIGKILL)
    server.wait_for("started again")
    with httpx.Client(base_url=url, timeout=30) as http:
        wait_healthy(http)
    assert http_process(server) != first


def test_a_port_that_is_taken_is_one_sentence_and_status_1(tiny, url, tmp_path):
    port = url.rpartition(":")[2]
    command = (*TP_RUNTIME, "serve", tiny, *SMALL, "--http", "--port", port)
    with program(tmp_path / "out", *command) as second:
        assert second.wait(30) == exit_status.FAILED
        (line,) = second.text().splitlines()
        assert f"Port {port}" in line
        second.assert_all_gone()


def test_sigterm_drains_http_streams_and_leaves_nothing(server, url):
    """The last test: it ends the server."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(iter(stream))]
        server.signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
    assert server.wait() == exit_status.OK
    server.assert_all_gone()


@pytest.mark.slow
def test_under_torchrun_the_first_keeper_serves_http(tiny, tmp_path):
    command = (*TORCHRUN, "-m", "tp_runtime.launch.serve", tiny, *SMALL, "--http", "--port", "0")
    with program(tmp_path / "out", *command) as running:
        running.wait_ready(120)
        url = running.folders()[0].read_http()
        with httpx.Client(base_url=url, timeout=30) as http:
            wait_healthy(http)
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert http_process(running).alive()
        running.signal(signal.SIGINT)
        running.wait()
        running.assert_all_gone()
