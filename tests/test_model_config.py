"""config.json is read as transformers reads it; what changes the mathematics is never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hub_configs import PARAMETERS, REAL_CONFIGS
from tests.tiny_models import KINDS, make_tiny, tiny_config
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig

ESSENTIAL = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def minimal(kind: str, **more: Any) -> dict[str, Any]:
    """Only what no default can replace, with sizes that the defaults fit to."""
    sizes = {"num_attention_heads": 32, "hidden_size": 64 * 32}
    full = tiny_config(kind, **sizes)
    return {**{name: full[name] for name in ESSENTIAL}, **more}


def read(kind: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(kind, **more))


def theirs(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**raw)


@pytest.mark.parametrize("kind", KINDS)
def test_absent_fields_mean_what_they_mean_in_transformers(kind: str) -> None:
    ours, reference = ModelConfig.from_dict(minimal(kind)), theirs(minimal(kind))
    assert ours.num_kv_heads == reference.num_key_value_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or 64)
    assert ours.max_position == reference.max_position_embeddings
    assert ours.rms_norm_eps == reference.rms_norm_eps
    assert ours.tie_word_embeddings == reference.tie_word_embeddings
    assert ours.rope.theta == reference.rope_parameters["rope_theta"]
    assert ours.rope.type == reference.rope_parameters["rope_type"]
    assert ours.bos_token_id == reference.bos_token_id
    wanted_eos = () if reference.eos_token_id is None else (reference.eos_token_id,)
    assert ours.eos_token_ids == wanted_eos
    assert ours.windows == _windows_of_transformers(kind, reference)


def _windows_of_transformers(kind: str, config: Any) -> tuple[int | None, ...]:
    """As its modelling code uses the config: Mistral by `sliding_window`, Qwen by `layer_types`."""
    if kind == "llama":
        return (None,) * config.num_hidden_layers
    if kind == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(
        config.sliding_window if layer == "sliding_attention" else None
        for layer in config.layer_types
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 16},
        {"sliding_window": None},
        {"use_sliding_window": True},
        {"use_sliding_window": False, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 0,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ],
)
def test_sliding_windows_are_those_of_transformers(kind: str, fields: dict[str, Any]) -> None:
    raw = tiny_config(kind, num_hidden_layers=4)
    for name in ("sliding_window", "use_sliding_window"):
        raw.pop(name, None)
    raw.update(fields)
    if kind == "mistral":
        raw.pop("layer_types", None)  # transformers' Mistral has one window for all layers
    wanted = _windows_of_transformers(kind, theirs(raw))
    assert ModelConfig.from_dict(raw).windows == wanted


def test_head_size_is_given_or_derived() -> None:
    assert read("qwen3", head_dim=24).head_dim == 24
    assert read("llama").head_dim == 16
    assert read("llama", head_dim=10).head_dim == 10
    assert read("llama", head_dim=None).head_dim == 16


def test_biases_are_the_architectures_own() -> None:
    qwen2 = read("qwen2")
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.mlp_bias) == (True, False, False)
    for kind in ("qwen3", "llama"):
        given = read(kind, attention_bias=True)
        assert (given.attention_bias, given.attention_out_bias) == (True, True)
    assert read("llama", mlp_bias=True).mlp_bias
    assert [read(kind).qk_norm for kind in KINDS] == [True, False, False, False]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rope_theta": 500.0}, ("default", 500.0)),
        ({"rope_theta": None}, ("default", 10000.0)),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, ("default", 7.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9}}, ("default", 9.0)),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 3}, ("default", 3.0)),
        ({"rope_scaling": None, "rope_theta": 3}, ("default", 3.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, ("linear", 10000.0)),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4, "rope_theta": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
            },
            ("linear", 2.0),
        ),
    ],
)
def test_old_and_new_rotary_keys(given: dict[str, Any], wanted: tuple[str, float]) -> None:
    raw = tiny_config("llama", **given)
    rope = ModelConfig.from_dict(raw).rope
    assert (rope.type, rope.theta) == wanted
    if given.get("rope_theta", 1) is not None:
        reference = theirs(raw).rope_parameters
        assert (reference["rope_type"], reference["rope_theta"]) == wanted


def test_original_length_beside_the_scaling_wins() -> None:
    """transformers gives the field outside of rope_parameters priority; absent, the model's
    length counts."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    inside = {**yarn, "original_max_position_embeddings": 64}
    assert read("qwen3", rope_scaling=inside).rope.original_max_position == 64
    both = read("qwen3", rope_scaling=inside, original_max_position_embeddings=32)
    assert both.rope.original_max_position == 32
    assert read("qwen3", rope_scaling=yarn).rope.original_max_position == 512


def test_scaled_models_can_be_asked_for_longer_contexts() -> None:
    linear = read("llama", rope_scaling={"type": "linear", "factor": 4.0})
    assert (linear.max_position, linear.longest_context) == (512, 2048)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read("qwen3", rope_scaling=yarn).longest_context == 2048
    assert read("qwen3").longest_context == 512


def test_partial_rotation_counts_dimensions() -> None:
    assert read("llama", partial_rotary_factor=0.5).rope.dim == 8
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert read("llama", rope_parameters=inside).rope.dim == 4


def test_end_ids_come_from_the_generation_config_first() -> None:
    raw = tiny_config("llama", eos_token_id=[5, 6])
    assert ModelConfig.from_dict(raw).eos_token_ids == (5, 6)
    assert ModelConfig.from_dict(raw, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert ModelConfig.from_dict(raw, {"eos_token_id": [8, 9, 8]}).eos_token_ids == (8, 9)
    assert ModelConfig.from_dict(raw, {"eos_token_id": None}).eos_token_ids == (5, 6)
    assert read("qwen2", eos_token_id=None).eos_token_ids == ()


def test_dtype_has_two_names() -> None:
    assert read("llama", torch_dtype="bfloat16").dtype == "bfloat16"
    assert read("llama", torch_dtype=None, dtype="float16").dtype == "float16"
    assert read("llama", torch_dtype="float32", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_configs_of_the_hub_are_read_whole(name: str) -> None:
    config = ModelConfig.from_dict(REAL_CONFIGS[name])
    assert config.num_parameters == PARAMETERS[name]
    assert config.ignored_fields == ()


def test_a_config_that_transformers_saved_is_read(tmp_path: Path) -> None:
    for kind in KINDS:
        theirs(tiny_config(kind)).save_pretrained(tmp_path / kind)
        saved = ModelConfig.from_folder(tmp_path / kind)
        assert saved == ModelConfig.from_dict(tiny_config(kind))


def test_a_folder_gives_config_end_ids_and_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    config = ModelConfig.from_folder(folder)
    assert config.eos_token_ids == (1, 2)
    assert len(config.vocabulary) == 64
    (folder / "tokenizer.json").unlink()
    assert ModelConfig.from_folder(folder).vocabulary == ""


def test_folders_that_cannot_work_are_told_apart(tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_folder(folder)
        return str(caught.value)

    assert f"{tmp_path / 'no'} is not a folder" in refused(tmp_path / "no")
    assert "has no config.json" in refused(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert "GGUF" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{'a': 1}")
    assert "is not valid JSON (line 1, column 2" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "should hold a JSON object" in refused(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    (tmp_path / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in refused(tmp_path)
