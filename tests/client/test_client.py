"""The blocking client: outputs, streams, many requests at once, errors, timeouts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.coordinator.fake_engine import (
    END_ID,
    TOKENIZER,
    FakeServer,
    fake_server,
    story,
    story_text,
    wait_until,
)
from tp_runtime import Client, SamplingParams
from tp_runtime.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerUnavailableError,
)
from tp_runtime.run_folder import ProcessId, ServerInfo


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def slow() -> Iterator[FakeServer]:
    with fake_server(step_s=0.01) as server:
        yield server


def test_a_prompt_gives_one_output_with_everything(client: Client) -> None:
    output = client.generate("Hello world", max_tokens=20, seed=3)
    assert output.text == output.outputs[0].text == story_text(3, 20)
    assert output.token_ids == story(3, 20)
    assert (output.finish_reason, output.stop_reason, output.logprobs) == ("length", None, None)
    assert output.prompt == "Hello world"
    assert output.prompt_token_ids == TOKENIZER.encode("Hello world")
    assert output.seed == 3
    assert 0 <= output.timings.queue_s <= output.timings.first_token_s <= output.timings.total_s


def test_prompts_as_ids_and_params_as_object(client: Client) -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    by_position = client.generate([1, 2, 3], params)
    by_name = client.generate(None, params, prompt_token_ids=[1, 2, 3])
    for output in (by_position, by_name):
        assert output.prompt_token_ids == [1, 2, 3]
        assert output.token_ids == story(1, 5)


def test_a_list_of_prompts_comes_back_in_order(client: Client) -> None:
    params = [SamplingParams(max_tokens=30 - i, seed=i) for i in range(20)]
    outputs = client.generate([f"prompt {i}" for i in range(20)], params)
    assert [o.token_ids for o in outputs] == [story(i, 30 - i) for i in range(20)]
    ids: Any = [[1], [2, 3]]
    assert len(client.generate(ids, max_tokens=1)) == 2


def test_a_seed_is_drawn_and_returned_when_none_is_given(client: Client) -> None:
    first, second = client.generate(["a", "a"], max_tokens=4)
    assert first.seed != second.seed
    again = client.generate("a", max_tokens=4, seed=first.seed)
    assert again.token_ids == first.token_ids == story(first.seed or 0, 4)


def test_several_samples_of_one_prompt(client: Client) -> None:
    output = client.generate("x", n=3, max_tokens=6, seed=10)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert [o.token_ids for o in output.outputs] == [story(10 + i, 6) for i in range(3)]


def test_stream_chunks_join_to_the_output(client: Client) -> None:
    stream = client.generate("x", max_tokens=200, seed=2, stream=True)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.output.text == story_text(2, 200)
    assert [i for chunk in chunks for i in chunk.token_ids] == story(2, 200)
    assert [chunk.finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])


def test_streams_of_several_prompts_are_told_apart(client: Client) -> None:
    stream = client.generate(["a", "b"], max_tokens=20, n=2, seed=5, stream=True)
    texts: dict[tuple[int, int], str] = {}
    for chunk in stream:
        key = (chunk.prompt_index, chunk.index)
        texts[key] = texts.get(key, "") + chunk.text
    expected = {(p, s): story_text(5 + s, 20) for p in (0, 1) for s in (0, 1)}
    assert texts == expected
    assert [output.prompt for output in stream.outputs] == ["a", "b"]


def test_logprobs_belong_to_their_tokens(client: Client) -> None:
    output = client.generate("x", max_tokens=7, seed=1, logprobs=1, prompt_logprobs=1)
    assert output.logprobs is not None
    assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
    assert output.prompt_logprobs == [None]


def test_stop_string_and_end_id(server: FakeServer, client: Client) -> None:
    full = story_text(0, 40)
    stop = full[10:14]
    output = client.generate("x", max_tokens=100, seed=0, stop=stop)
    assert (output.text, output.finish_reason) == (full[: full.index(stop)], "stop")
    assert output.stop_reason == stop
    assert output.token_ids == story(0, len(output.token_ids))
    server.engine.end_after = 5
    try:
        ended = client.generate("x", max_tokens=100, seed=0)
    finally:
        server.engine.end_after = None
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.token_ids == [*story(0, 5), END_ID]
    assert ended.text == story_text(0, 5)


def test_max_tokens_zero_gives_an_empty_output(client: Client) -> None:
    output = client.generate("x", max_tokens=0)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")


def test_without_detokenize_there_are_ids_only(client: Client) -> None:
    output = client.generate("x", max_tokens=5, seed=1, detokenize=False)
    assert (output.text, output.token_ids) == ("", story(1, 5))


def test_chat_goes_through_the_template(client: Client) -> None:
    message = {"role": "user", "content": "Hi"}
    output = client.chat([message], max_tokens=5, seed=1)
    ids = TOKENIZER.encode("<|im_start|>Hi<|im_end|>:", add_special_tokens=False)
    assert output.prompt_token_ids == ids
    both = client.chat([[message], [message, message]], max_tokens=1)
    assert len(both) == 2
    chunks = list(client.chat([message], max_tokens=5, seed=1, stream=True))
    assert "".join(c.text for c in chunks) == output.text


def test_info_tokenize_detokenize(client: Client) -> None:
    info = client.info()
    assert (info.model, info.state, info.stats["x"]) == ("fake", "ready", 1.0)
    ids = client.tokenize("Hello wörld")
    assert ids == TOKENIZER.encode("Hello wörld")
    assert client.detokenize([*ids, 10**6]) == "Hello wörld"
    message = [{"role": "user", "content": "a"}]
    assert client.tokenize(messages=message) == TOKENIZER.encode("<|im_start|>a<|im_end|>:")


def test_a_thousand_requests_at_once_from_several_threads(client: Client) -> None:
    results: dict[int, Any] = {}

    def work(thread: int) -> None:
        params = [SamplingParams(max_tokens=3 + i % 5, seed=thread * 250 + i) for i in range(250)]
        results[thread] = client.generate([f"{i}" for i in range(250)], params)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(4):
        got = [output.token_ids for output in results[number]]
        assert got == [story(number * 250 + i, 3 + i % 5) for i in range(250)]


def test_a_list_longer_than_the_servers_queue_is_sent_as_answers_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tp_runtime.client.MAX_IN_FLIGHT", 8)
    with fake_server(max_requests=8) as server, Client(server.address) as client:
        outputs = client.generate(["x"] * 40, max_tokens=3, seed=1)
        assert [o.token_ids for o in outputs] == [story(1, 3)] * 40
        stream = client.generate(["x"] * 20, max_tokens=3, seed=1, stream=True)
        assert sum(len(chunk.token_ids) for chunk in stream) == 60


def test_submit_tells_how_far_it_is(slow: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_runtime.client_arguments.BLOCKING_FLUSH_S", 0.05)
    with Client(slow.address) as client:
        pending = client.submit("abc", max_tokens=40, seed=4)
        wait_until(lambda: 0 < pending.num_tokens < 40)
        assert not pending.done()
        assert pending.num_prompt_tokens == len(TOKENIZER.encode("abc"))
        assert pending.result(20).token_ids == story(4, 40)


def test_closing_a_stream_cancels_at_the_server(slow: FakeServer) -> None:
    with Client(slow.address) as client:
        stream = client.generate("x", stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: not slow.engine.running)
        assert list(stream) == []
        with client.generate("x", stream=True) as second:
            next(second)
        wait_until(lambda: not slow.engine.running)
        third = client.generate("x", stream=True)
        next(third)
        del third
        gc.collect()
        wait_until(lambda: not slow.engine.running)
        assert len(slow.engine.cancelled) == 3


def test_cancel_from_another_thread_ends_the_stream_with_an_error(slow: FakeServer) -> None:
    with Client(slow.address) as client:
        stream = client.generate("x", stream=True)
        next(stream)
        threading.Timer(0.1, client.cancel, [stream.request_id]).start()
        with pytest.raises(RequestCancelledError):
            list(stream)
        wait_until(lambda: not slow.engine.running)


def test_one_failing_request_of_a_list_cancels_the_others(slow: FakeServer) -> None:
    with Client(slow.address) as client:
        with pytest.raises(InvalidRequestError, match="Token ids must be integers"):
            client.generate([[1], [2**40]])
        wait_until(lambda: not slow.engine.running)


def test_the_servers_time_limit_is_a_typed_error_and_the_clients_own_comes_after(
    slow: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake engine ignores deadlines, as a hanging server would."""
    monkeypatch.setattr("tp_runtime.client_calls.TIMEOUT_GRACE_S", 0.2)
    with Client(slow.address, timeout=60) as client:
        with pytest.raises(RequestTimeoutError):
            client.generate("x", timeout=0.3)
        wait_until(lambda: not slow.engine.running)
        deadline = slow.engine.submitted[0].deadline
        assert deadline is not None
        assert abs(deadline - time.monotonic()) < 5
        assert client.generate("x", max_tokens=2).finish_reason == "length"


def test_errors_of_the_engine_keep_their_type() -> None:
    with fake_server(max_requests=0) as server, Client(server.address) as client:
        with pytest.raises(OverloadedError, match="The fake engine is full"):
            client.generate("x")
        with pytest.raises(OverloadedError):
            list(client.generate("x", stream=True))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"temprature": 1.0}, "no parameter 'temprature'; did you mean 'temperature'"),
        ({"foo": 1}, "no parameter 'foo'; there are n, temperature"),
        ({"temperature": "hot"}, r"sampling parameter is wrong: Expected `float`.*temperature"),
        ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ({"params": SamplingParams(), "top_k": 3}, "either params or top_k as keyword"),
        ({"params": {"top_k": 3}}, "params is a dict; give a SamplingParams"),
        ({"prompts": None}, "Give either a prompt"),
        ({"prompts": 5}, "not a int"),
        ({"prompts": ["a", ["b"]]}, "integer token ids"),
        ({"prompts": ["a", "b"], "params": [SamplingParams()]}, "2 prompts and 1 SamplingParams"),
        ({"timeout": 0.0}, "timeout=0.0 must be greater than 0"),
        ({"prompts": "\ud800"}, "cannot be sent"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_a_sentence(
    client: Client, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        client.generate(
            **{"prompts": "x", "max_tokens": 1, **arguments}
            if "params" not in arguments
            else {"prompts": "x", **arguments}
        )


@pytest.mark.parametrize("messages", [[], "hi", [3], [[]]])
def test_chats_that_are_none_are_refused(client: Client, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages is a list of"):
        client.chat(messages)


def test_an_over_long_request_is_refused_before_it_is_sent(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="takes up to"):
        client.generate("x" * (17 << 20))


def test_a_server_without_tokenizer_takes_ids_only() -> None:
    with fake_server(tokenizer=None) as server, Client(server.address) as client:
        output = client.generate([1, 2], max_tokens=3, seed=1)
        assert (output.token_ids, output.text) == (story(1, 3), "")
        with pytest.raises(InvalidRequestError, match=r"no tokenizer.*send prompt_token_ids"):
            client.generate("text")
        with pytest.raises(InvalidRequestError, match="no tokenizer, so stop strings"):
            client.generate([1], stop="x")
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            client.tokenize("text")


def test_nobody_listening_is_one_sentence_within_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(ServerUnavailableError, match=r"Nobody answers at .*; start a server"):
        Client("tcp://127.0.0.1:9", connect_timeout=0.5)
    assert time.monotonic() - start < 3


def test_something_that_is_no_server_is_not_waited_for_longer() -> None:
    import socket

    listener = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with listener, pytest.raises(ServerUnavailableError):
        Client(address, connect_timeout=0.5)


def test_an_address_that_is_none_is_refused_at_once() -> None:
    for address in ("localhost:80", "http://x", "tcp://host", "ipc://"):
        with pytest.raises(InvalidRequestError, match="is not an address"):
            Client(address)


def test_a_closed_client_says_so(server: FakeServer) -> None:
    client = Client(server.address)
    client.close()
    client.close()
    with pytest.raises(ServerUnavailableError, match="closed"):
        client.generate("x")


def test_close_ends_waiting_calls_of_other_threads(slow: FakeServer) -> None:
    client = Client(slow.address)
    pending = client.submit("x")
    threading.Timer(0.1, client.close).start()
    with pytest.raises(ServerUnavailableError, match="closed"):
        pending.result(5)
    wait_until(lambda: not slow.engine.running)


def test_a_forgotten_client_lets_go_of_its_connection(slow: FakeServer) -> None:
    def threads() -> int:
        return sum(thread.name == "tp_runtime client" for thread in threading.enumerate())

    before = threads()
    stream = Client(slow.address).generate("x", stream=True)
    next(stream)
    gc.collect()
    assert next(stream).finish_reason is None  # a stream keeps what it needs
    assert threads() == before + 1
    del stream
    gc.collect()
    wait_until(lambda: threads() == before)
    wait_until(lambda: slow.frontend.counters["clients_gone"] == 1)


def test_the_only_server_of_this_machine_is_found(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        ServerInfo(
            address=server.address,
            model="m",
            tensor_parallel_size=1,
            device="cpu",
            process=ProcessId.current(),
        )
    ]
    monkeypatch.setattr("tp_runtime.run_folder.list_servers", lambda: found)
    with Client() as client:
        assert client.address == server.address
    found *= 2
    with pytest.raises(ServerUnavailableError, match=f"2 servers.*{server.address} \\(m\\)"):
        Client()
    found.clear()
    with pytest.raises(ServerUnavailableError, match=r"No server of yours.*tp-runtime serve"):
        Client()


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_client_and_front_end_load_neither_torch_nor_transformers() -> None:
    modules = "tp_runtime.client, tp_runtime.async_client, tp_runtime.coordinator.frontend"
    loaded = "[m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]"
    assert python(f"import sys, {modules}; print({loaded})") == "[]"


def test_importing_the_package_is_quick_and_its_names_are_there() -> None:
    """Processor time, because other tests may run beside this one."""
    code = (
        "import time; t = time.process_time(); import tp_runtime; print(time.process_time() - t);"
        "import sys; assert 'zmq' not in sys.modules;"
        "from tp_runtime import Client, AsyncClient, SamplingParams, InvalidRequestError;"
        "assert set(tp_runtime.__all__) <= set(dir(tp_runtime))"
    )
    assert float(python(code)) < 0.15


def test_a_program_that_forgets_to_close_its_client_ends(slow: FakeServer) -> None:
    python(
        "from tp_runtime import Client\n"
        f"client = Client({slow.address!r})\n"
        "stream = client.generate('x', stream=True)\n"
        "print(next(stream))"
    )
    wait_until(lambda: not slow.engine.running)
