"""What changes the mathematics and is not implemented is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_models import tiny_config
from tp_runtime.architectures import ARCHITECTURES
from tp_runtime.errors import ConfigError
from tp_runtime.model_config import ModelConfig


def read(kind: str, **more: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(kind, **more))


def refusal(kind: str, **more: Any) -> str:
    """The message with which a config is refused; one sentence."""
    with pytest.raises(ConfigError) as caught:
        read(kind, **more)
    message = str(caught.value)
    assert message.endswith((".", ")."))
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", "relu2"),
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 256),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("quantization", {"group_size": 64, "bits": 4}),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.015),
        ("logits_scaling", 8.0),
        ("scale_emb", 12),
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("position_embedding_type", "alibi"),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
        ("add_cross_attention", True),
        ("pruned_heads", {"0": [1]}),
        ("per_layer_config", {"1": {"intermediate_size": 8}}),
        ("no_rope_layers", [1, 0]),
        ("use_qk_norm", True),
        ("sliding_window", 16),
        ("attention_sinks", True),
        ("clip_qkv", 8.0),
        ("attention_chunk_size", None),
    ],
)
def test_fields_that_change_the_mathematics_are_refused_by_name(name: str, value: object) -> None:
    """Llama has none of them; null is always neutral."""
    if value is not None:
        assert name in refusal("llama", **{name: value})
    assert read("llama", **{"hidden_act": "silu"} if name == "hidden_act" else {name: None})


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("qwen2", {"attention_bias": False}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"mlp_bias": True}),
        ("qwen3", {"mlp_bias": True}),
        ("mistral", {"mlp_bias": True}),
    ],
)
def test_biases_an_architecture_cannot_have_are_refused(kind: str, field: dict[str, bool]) -> None:
    assert f"{next(iter(field))}={next(iter(field.values()))} is not possible" in refusal(
        kind, **field
    )


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "su", "factor": 2.0}, "su"),
        ({"rope_type": "mrope", "mrope_section": [2, 3, 3]}, "mrope"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "dynamic"}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        (["linear", 2.0], "rope_scaling"),
    ],
)
def test_rotary_settings_that_are_not_implemented_are_refused(scaling: Any, named: str) -> None:
    assert named in refusal("qwen3", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ("llama", {"hidden_size": 64.5}, "hidden_size"),
        ("llama", {"hidden_size": 66}, "not a multiple"),
        ("llama", {"head_dim": 10, "partial_rotary_factor": 0.3}, "partial_rotary_factor 0.3"),
        ("llama", {"vocab_size": True}, "vocab_size"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("llama", {"torch_dtype": 16}, "dtype"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_bad_values_are_named(kind: str, fields: dict[str, Any], named: str) -> None:
    assert named in refusal(kind, **fields)


def test_unknown_fields_that_do_not_sound_like_mathematics_are_reported() -> None:
    config = read("llama", my_run_id="abc", attention_dropout=0.1, use_cache=False)
    assert config.ignored_fields == ("my_run_id",)


def test_unknown_architectures_list_the_known_ones() -> None:
    for given in (["GPT2LMHeadModel"], [], None, "MixtralForCausalLM"):
        message = refusal("llama", architectures=given)
        for name in ARCHITECTURES:
            assert name in message
    assert "model_type 'qwen2'" in refusal("llama", model_type="qwen2")
