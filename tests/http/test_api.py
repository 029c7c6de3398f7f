"""The API over a fake engine: shapes, streams, refusals, disconnects."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.coordinator.fake_engine import story, story_text, wait_until
from tests.http.api_server import ApiServer, api_server
from tp_runtime.errors import OverloadedError, RequestFailedError

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("api")) as server:
        yield server


def error_of(answer: httpx.Response, status: int) -> dict[str, str]:
    """The error, which must have OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    return error


# ------------------------------------------------------------ answers


def test_a_completion_has_openais_shape(api):
    answer = api.post(COMPLETIONS, model="fake", prompt="Hello", max_tokens=5, seed=3).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (story_text(3, 5), "length")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(api):
    assert api.post(COMPLETIONS, prompt="Hello").json()["usage"]["completion_tokens"] == 16


def test_prompts_and_samples_are_choices_in_order(api):
    for prompts in (["a", "b"], [[1, 2], [3]]):
        answer = api.post(COMPLETIONS, prompt=prompts, n=2, max_tokens=3, seed=1).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [story_text(1, 3), story_text(2, 3)] * 2


def test_echo_gives_the_prompt_back_with_its_logprobs(api):
    ids = story(5, 4)
    answer = api.post(COMPLETIONS, prompt=ids, echo=True, logprobs=1, max_tokens=2, seed=1).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == story_text(5, 4) + story_text(1, 2)
    assert logprobs["token_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


def test_a_streamed_completion_joins_to_the_whole(api):
    events = api.events(
        COMPLETIONS, prompt="Hello", max_tokens=30, seed=3, stream_options={"include_usage": True}
    )
    *deltas, last = events
    assert "".join(event["choices"][0]["text"] for event in deltas) == story_text(3, 30)
    assert [event["choices"][0]["finish_reason"] for event in deltas][-1] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30
    assert all(event["usage"] is None for event in deltas)


def test_a_streamed_chat_begins_with_the_role_and_counts_as_it_goes(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, *deltas, last = api.events(
        CHAT, messages=HELLO, max_tokens=10, seed=2, stream_options=options
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    contents = [event["choices"][0]["delta"].get("content", "") for event in deltas]
    assert "".join(contents) == story_text(2, 10)
    counted = [event["usage"]["completion_tokens"] for event in deltas]
    assert counted == sorted(counted)
    assert counted[-1] == 10
    assert last["usage"]["prompt_tokens"] == deltas[0]["usage"]["prompt_tokens"] > 0


def test_a_chat_gives_logprobs_with_bytes(api):
    answer = api.post(
        CHAT, messages=HELLO, max_tokens=3, seed=2, logprobs=True, top_logprobs=1
    ).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == story_text(2, 3)
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode() == story_text(2, 3)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)


def test_streams_with_several_samples_tell_them_apart(api):
    texts = {0: "", 1: ""}
    for event in api.events(CHAT, messages=HELLO, n=2, max_tokens=6, seed=4):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: story_text(4, 6), 1: story_text(5, 6)}


def test_parameters_reach_the_engine(api):
    api.post(
        CHAT,
        messages=HELLO,
        max_completion_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"5": -1.5},
        ignore_eos=True,
        min_tokens=1,
        stop="xyz",
        seed=9,
    ).raise_for_status()
    params = api.engine.engine.submitted[-1].sequences[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.seed) == (7, 0.1, 9)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (params.logit_bias, params.ignore_eos, params.min_tokens) == ({5: -1.5}, True, 1)
    assert params.stop == ["xyz"]


def test_tokenize_and_detokenize_are_inverse(api):
    answer = api.post("/tokenize", prompt="Hello there", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    assert "".join(answer["token_strs"]) == "Hello there"
    assert api.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "Hello there"}
    chat = api.post("/tokenize", messages=HELLO).json()
    assert chat["count"] > 0


def test_models_version_and_health(api):
    (model,) = api.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("fake", 4096)
    assert api.http.get("/v1/models/fake").json() == model
    assert api.http.get("/version").json()["version"]
    assert api.http.get("/health").json()["status"] == "ready"


def test_health_is_503_and_says_recovering(api):
    api.engine.state = "recovering"
    try:
        answer = api.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "recovering")
    finally:
        api.engine.state = "ready"


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "suffix", "end"),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "use_beam_search", True),
        (COMPLETIONS, "response_format", "json"),
        (COMPLETIONS, "response_format", {"type": "xml"}),
        (COMPLETIONS, "response_format", {"type": "json_object", "schema": {}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}),
        (CHAT, "tool_choice", "required"),
        (CHAT, "audio", {"voice": "alloy"}),
        (CHAT, "guided_json", {}),
        (CHAT, "reasoning_effort", "high"),
        (CHAT, "store", True),
        (CHAT, "top_logprobs", 2),
        (CHAT, "stream_options", {"include_usage": True}),
        (CHAT, "max_tokens", "many"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(api, path, field, value):
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    error = error_of(api.post(path, **prompt, **{field: value}), 400)
    assert error["param"] == field
    assert field in error["message"]


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}}
FORMATS = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
]


@pytest.mark.parametrize("response_format", FORMATS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_response_format_reaches_the_engine_as_what_may_be_drawn(api, path, response_format):
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    answer = api.post(path, **prompt, max_tokens=2, response_format=response_format)
    assert answer.status_code == 200, answer.text
    (seq,) = api.engine.engine.submitted[-1].sequences
    assert (seq.mask is None) == (response_format["type"] == "text")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_used_is_400_and_says_why(api, stream):
    schema = {"type": "object", "properties": {"x": {"not": {}}}}
    body = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    answer = api.post(CHAT, messages=HELLO, response_format=body, stream=stream)
    assert 'Unimplemented keys: ["not"]' in error_of(answer, 400)["message"]


def test_two_formats_at_once_are_refused(api):
    answer = api.post(
        COMPLETIONS,
        prompt="x",
        response_format={"type": "json_object"},
        structured_outputs={"regex": "a+"},
    )
    assert "structured_outputs" in error_of(answer, 400)["message"]
    assert error_of(api.post(COMPLETIONS, prompt="x", structured_outputs={}), 400)


@pytest.mark.parametrize("field", ["suffix", "best_of", "logprobs", "stop", "seed", "user"])
def test_null_asks_for_nothing(api, field):
    answer = api.post(COMPLETIONS, prompt="x", max_tokens=1, **{field: None})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "'prompt' is missing"),
        (b'{"prompt": []}', "prompt is empty"),
        (b'{"prompt": [1, "a"]}', "mixes"),
        (b'{"prompt": "x", "temperature": -1}', "temperature"),
        (b'{"prompt": "x", "n": 1000}', "n=1000"),
        (b'{"prompt": "x", "echo": true, "stream": true, "logprobs": 1}', "stream"),
        (b'{"prompt": [99999999999999999999999]}', ""),
        (b"[" * 100_000, ""),
    ],
)
def test_a_broken_body_is_400(api, body, words):
    error = error_of(api.http.post(COMPLETIONS, content=body), 400)
    assert words in error["message"]


def test_another_model_and_another_path_are_404(api):
    assert error_of(api.post(COMPLETIONS, model="gpt", prompt="x"), 404)["param"] == "model"
    assert "'fake'" in error_of(api.post(CHAT, model="gpt", messages=HELLO), 404)["message"]
    error_of(api.http.get("/v1/models/gpt"), 404)
    error_of(api.http.get("/v1/nothing"), 404)
    error_of(api.http.get(COMPLETIONS), 405)


def test_a_body_that_is_too_large_is_413_announced_or_not(api):
    def parts() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    error_of(api.http.post(COMPLETIONS, content=b" " * (17 << 20)), 413)
    error_of(api.http.post(COMPLETIONS, content=parts()), 413)


def test_a_time_limit_that_passes_is_408(api):
    api.engine.engine.run.clear()
    try:
        error_of(api.post(COMPLETIONS, prompt="x", timeout=0.2), 408)
    finally:
        api.engine.engine.run.set()


def test_a_full_server_is_429_and_one_that_ends_503(api):
    frontend = api.engine.frontend
    for error, status in ((OverloadedError("Full."), 429), (None, 200)):
        frontend._refusal = error
        answer = api.post(COMPLETIONS, prompt="x", max_tokens=1)
        assert answer.status_code == status
        assert ("retry-after" in answer.headers) == (status == 429)


def test_an_error_within_a_stream_is_an_event(api):
    api.engine.engine.step_s = 0.05
    try:
        with api.http.stream(
            "POST", CHAT, json={"messages": HELLO, "max_tokens": 4000, "stream": True}
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            request = api.engine.engine.submitted[-1]
            api.engine.frontend.texts.failed(request.key, RequestFailedError("Not finite."))
            data = [line.removeprefix("data: ") for line in lines if line]
    finally:
        api.engine.engine.step_s = 0.0
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["error"]["message"] == "Not finite."


# ------------------------------------------------------------ clients that go


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels_its_request(api, stream):
    engine = api.engine.engine
    engine.run.clear()
    before = len(engine.submitted), len(engine.cancelled)
    try:
        host, port = api.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": stream})
        with socket.create_connection((host, int(port))) as raw:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            raw.sendall((head + body).encode())
            wait_until(lambda: len(engine.submitted) > before[0])
        wait_until(lambda: len(engine.cancelled) > before[1])
    finally:
        engine.run.set()


def test_many_streams_at_once_are_all_whole(api):
    """64 clients; each gets its own text."""
    import asyncio

    async def one(http: httpx.AsyncClient, seed: int) -> None:
        body = {"prompt": "x", "max_tokens": 50, "stream": True, "seed": seed}
        answer = await http.post(COMPLETIONS, json=body)
        blocks = answer.text.split("\n\n")[:-2]
        events = [json.loads(block.removeprefix("data: ")) for block in blocks]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == story_text(seed, 50)

    async def main() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=api.url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(one(http, seed) for seed in range(64)))

    asyncio.run(main())


def test_a_slow_body_does_not_hold_up_others(api):
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n".encode())
        started = time.monotonic()
        assert api.post(COMPLETIONS, prompt="x", max_tokens=1).status_code == 200
        assert time.monotonic() - started < 5
