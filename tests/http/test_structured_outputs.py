"""`response_format` through the openai SDK against two CPU workers: the schema holds.

Most tests take tiny random weights, whose text is noise but for the grammar; one takes the demo's
model (made once, in the cache folder; without it and without a package index it is skipped).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.launch.processes import TP_RUNTIME, Program, program
from tests.tiny_models import make_tiny
from tp_runtime import Client

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 1, "maximum": 50_000_000},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "population", "capital"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": CITY, "strict": True},
}
ASK: Any = [{"role": "user", "content": "Describe Paris as JSON."}]
FREE: Any = {"temperature": 0.0, "max_tokens": 24}


@contextlib.contextmanager
def served(folder: object, out: object) -> Iterator[Program]:
    flags = ("--device", "cpu", "--max-model-len", "512", "--num-kv-blocks", "256")
    command = (*TP_RUNTIME, "serve", str(folder), "-tp", "2", *flags, "--http", "--port", "0")
    with program(Path(str(out)) / "out", *command) as running:
        running.wait_ready(180)
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Program]:
    tiny = make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    with served(tiny, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def sdk(server) -> Iterator[openai.OpenAI]:
    url = f"{server.folders()[0].read_http()}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(sdk) -> str:
    return sdk.models.list().data[0].id


@pytest.mark.slow
def test_real_weights_write_sense_within_the_schema(demo_model, tmp_path):
    with served(demo_model, tmp_path) as running:
        url = f"{running.folders()[0].read_http()}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=ASK,
                response_format=FORMAT,
                temperature=0,
                max_tokens=100,
            )
    city = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(city, CITY)
    assert "Paris" in city["name"]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.8])
def test_an_answer_is_valid_under_its_schema(sdk, model, temperature):
    answer = sdk.chat.completions.create(
        model=model,
        messages=ASK,
        response_format=FORMAT,
        temperature=temperature,
        seed=3,
        n=2,
        max_tokens=300,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), CITY)


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    population: int = pydantic.Field(ge=0, le=10**7)
    capital: bool


def test_the_sdks_own_parse_gives_an_object_of_the_class(sdk, model):
    answer = sdk.chat.completions.parse(
        model=model, messages=ASK, response_format=City, temperature=0, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_stream_and_a_completion_are_constrained_too(sdk, model):
    stream = sdk.chat.completions.create(
        model=model,
        messages=ASK,
        response_format=FORMAT,
        stream=True,
        temperature=0,
        max_tokens=300,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    jsonschema.validate(json.loads(text), CITY)
    answer = sdk.completions.create(
        model=model,
        prompt="A person: ",
        temperature=0,
        max_tokens=12,
        extra_body={"structured_outputs": {"regex": "[A-Z][a-z]{2,8} \\([0-9]{2}\\)"}},
    )
    assert re.fullmatch(r"[A-Z][a-z]{2,8} \([0-9]{2}\)", answer.choices[0].text)


def test_json_object_is_an_object(sdk, model):
    answer = sdk.chat.completions.create(
        model=model,
        messages=ASK,
        response_format={"type": "json_object"},
        stop=["}"],
        extra_body={"include_stop_str_in_output": True},
        temperature=0,
        max_tokens=200,
    )
    (choice,) = answer.choices
    assert choice.message.content.startswith("{")
    assert choice.finish_reason in ("stop", "length")


def test_others_do_not_change_beside_a_constrained_request(sdk, model):
    def free() -> list[str]:
        texts = []
        for seed in range(3):
            stream = sdk.completions.create(
                model=model, prompt="The sea is", seed=seed, max_tokens=24, stream=True
            )
            texts.append("".join(chunk.choices[0].text for chunk in stream))
        return texts

    alone = free()
    answers = []

    def constrained() -> None:
        answers.append(
            sdk.chat.completions.create(
                model=model, messages=ASK, response_format=FORMAT, seed=1, n=3, max_tokens=120
            )
        )

    thread = threading.Thread(target=constrained)
    thread.start()
    beside = free()
    thread.join()
    assert beside == alone
    for choice in answers[0].choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), CITY)


def test_a_bad_schema_is_the_sdks_bad_request(sdk, model):
    broken: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: no"):
        sdk.chat.completions.create(model=model, messages=ASK, response_format=broken)


def test_python_users_give_structured_outputs(server):
    with Client(server.wait_ready().address) as client:
        text = client.chat(
            ASK, temperature=0, max_tokens=8, structured_outputs={"choice": ["north", "south"]}
        ).text
    assert text in ("north", "south")


@pytest.mark.faults
def test_an_answer_is_valid_though_a_worker_dies_meanwhile(server, sdk, model):
    whole = sdk.chat.completions.create(
        model=model, messages=ASK, response_format=FORMAT, temperature=0, max_tokens=300
    )
    stream = sdk.chat.completions.create(
        model=model,
        messages=ASK,
        response_format=FORMAT,
        temperature=0,
        max_tokens=300,
        stream=True,
    )
    pieces = [next(stream).choices[0].delta.content or "" for _ in range(5)]
    victim = max(server.workers(), key=lambda worker: worker.pid)
    os.kill(victim.pid, signal.SIGKILL)
    pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    jsonschema.validate(json.loads("".join(pieces)), CITY)
