"""Random and mutated model folders: a config that is understood, or one clear ConfigError.

Never another exception, a hang, or memory in proportion to a number in a file."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import KINDS, make_tiny, tiny_config
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig
from tp_runtime.text.tokenizer import Tokenizer

MEMORY_BYTES = 16 << 20
LONGEST_MESSAGE = 4000

EXTREMES = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, 1e-308, float("nan"), float("inf")]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | EXTREMES
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3"]) | VALUES,
        **dict.fromkeys(
            (
                *("factor", "rope_theta", "original_max_position_embeddings", "beta_fast"),
                *("beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "truncate"),
                *("attention_factor", "partial_rotary_factor"),
            ),
            VALUES,
        ),
    },
)
NAMES = sorted(
    {name for kind in KINDS for name in tiny_config(kind)}
    | {"rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types", "sliding_window"}
    | {"use_sliding_window", "max_window_layers", "dtype", "head_dim", "generation"}
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A sound config with some fields replaced, left out or added."""
    config = tiny_config(draw(st.sampled_from(KINDS)))
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)):
        if draw(st.booleans()):
            config.pop(name, None)
        else:
            config[name] = draw(ROPE if name.startswith("rope_") else VALUES)
    for name in draw(st.lists(st.text(max_size=12), max_size=2)):
        config[name] = draw(VALUES)
    return config


def refusal(read: Callable[[], object]) -> str | None:
    """The message of a ConfigError, None when there was none; nothing else may be raised."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return None


def understood_or_refused(read: Callable[[], ModelConfig]) -> None:
    tracemalloc.start()
    try:
        message = refusal(read)
        if message is not None:
            assert 10 < len(message) < LONGEST_MESSAGE
        else:
            model = read()
            assert model.longest_context >= 1
            assert model.num_parameters >= 1
            assert len(model.windows) == model.num_layers
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


@settings(max_examples=400)
@given(config=configs(), generation=st.just({}) | st.dictionaries(st.just("eos_token_id"), VALUES))
def test_any_fields_are_understood_or_refused(config, generation):
    understood_or_refused(lambda: ModelConfig.from_dict(config, generation))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("fuzz") / "tiny")


@settings(max_examples=150)
@given(data=st.data())
def test_any_bytes_in_config_json_are_understood_or_refused(folder, data):
    good = json.dumps(tiny_config("qwen3")).encode()
    (folder / "config.json").write_bytes(data.draw(mutated(good)))
    understood_or_refused(lambda: ModelConfig.from_folder(folder))


@st.composite
def mutated(draw: st.DrawFn, good: bytes) -> bytes:
    """Cut off, overwritten in places, or something else altogether."""
    way = draw(st.sampled_from(["cut", "overwrite", "insert", "other"]))
    if way == "other":
        return draw(st.binary(max_size=200) | VALUES.map(lambda v: json.dumps(v).encode()))
    at = draw(st.integers(0, len(good) - 1))
    if way == "cut":
        return good[:at]
    piece = draw(st.binary(min_size=1, max_size=6) | st.sampled_from([b"NaN", b"1e999", b"[" * 9]))
    return good[:at] + piece + good[at + (len(piece) if way == "overwrite" else 0) :]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"[" * 200_000, id="deep"),
        pytest.param(b'{"hidden_size": ' + b"9" * 10_000 + b"}", id="long number"),
        pytest.param(b"\xff\xfe{\x00}\x00", id="UTF-16"),
        pytest.param(b"", id="empty"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_json_itself_chokes_on_is_refused(tmp_path, name, text):
    """A deep list is a RecursionError, a long number a plain ValueError."""
    folder = make_tiny("llama", tmp_path / "tiny")
    (folder / name).write_bytes(text)
    with pytest.raises(ConfigError, match=name) as caught:
        ModelConfig.from_folder(folder)
    assert len(str(caught.value)) < LONGEST_MESSAGE


def test_a_number_of_layers_is_believed_only_where_it_can_be_true():
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        ModelConfig.from_dict(tiny_config("qwen3", num_hidden_layers=2**31))


@settings(max_examples=100)
@given(data=st.data())
def test_any_tokenizer_files_are_understood_or_refused(folder, data):
    """tokenizer_config.json, its template, and tokenizer.json."""
    name = data.draw(st.sampled_from(["tokenizer_config.json", "tokenizer.json"]))
    path = folder / name
    good = path.read_bytes()
    try:
        if name == "tokenizer_config.json" and data.draw(st.booleans()):
            fields = json.loads(good)
            for field in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1)):
                fields[field] = data.draw(VALUES)
            path.write_text(json.dumps(fields))
        else:
            path.write_bytes(data.draw(mutated(good)))
        message = refusal(lambda: Tokenizer.from_folder(folder).encode("Hello"))
        assert message is None or 10 < len(message) < LONGEST_MESSAGE
    finally:
        path.write_bytes(good)
