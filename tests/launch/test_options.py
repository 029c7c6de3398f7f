"""Flags and settings are the same thing."""

from __future__ import annotations

import click
import msgspec
import pytest
from click.testing import CliRunner

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch.options import _HELP, engine_config, engine_options


def config_of(*arguments: str) -> EngineConfig:
    seen = {}

    @click.command()
    @click.argument("model")
    @engine_options
    def command(model, **options):
        seen["config"] = engine_config(model, options)

    result = CliRunner().invoke(command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen["config"]


def test_every_setting_has_a_flag_with_a_help_line():
    assert _HELP.keys() == {f.name for f in msgspec.structs.fields(EngineConfig)} - {"model"}


def test_without_flags_the_settings_are_the_defaults():
    assert config_of("m") == EngineConfig(model="m")


def test_flags_are_named_as_people_know_them():
    config = config_of(
        *("m", "-tp", "4", "--dtype", "bfloat16", "--max-model-len", "128", "--enforce-eager"),
        *("--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--drain-timeout", "7"),
    )
    assert config.tensor_parallel_size == 4
    assert (config.dtype, config.max_model_len, config.enforce_eager) == ("bfloat16", 128, True)
    assert config.gpu_memory_utilization == 0.5
    assert not config.enable_prefix_caching
    assert config.drain_timeout_s == 7.0


def test_what_is_on_by_itself_has_a_flag_to_switch_it_off():
    assert config_of("m", "--disable-product-tuning").disable_product_tuning
    assert config_of("m", "--disable-custom-all-reduce").disable_custom_all_reduce
    assert config_of("m", "--disable-prefill-graphs").disable_prefill_graphs
    assert not config_of("m").disable_prefill_graphs
    assert not config_of("m").disable_product_tuning


def test_a_value_out_of_range_names_the_flag_and_the_range():
    with pytest.raises(ConfigError, match=r"--run-ahead 0 .* 1 to 64"):
        config_of("m", "--run-ahead", "0")
