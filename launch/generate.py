"""The command `tp-runtime generate`: prompts in, completions out, nothing left running."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tp_runtime.errors import ConfigError
from tp_runtime.launch.options import engine_config, engine_options, take_engine_options

if TYPE_CHECKING:
    from tp_runtime.outputs import RequestOutput


@click.command("generate")
@click.argument("model")
@click.option("--prompt", "prompts", multiple=True, help="Text to go on with; repeatable.")
@click.option("--prompt-ids", multiple=True, help="Token ids, as in 1,2,3; repeatable.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most new tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float, default=1.0, help="Smallest set of this probability.")
@click.option("--top-k", type=int, default=0, help="Among the k most likely; 0: off.")
@click.option("--min-p", type=float, default=0.0, help="At least this times the most likely.")
@click.option("--stop", multiple=True, help="End at this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end token.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per prompt and line.")
@engine_options
@click.pass_context
def generate_command(context: click.Context, /, model: str, **options: Any) -> int:
    """Complete prompts with MODEL, a folder or a name on the Hugging Face hub.

    With --seed the same draws come again, for every prompt."""
    from tp_runtime.llm import LLM
    from tp_runtime.sampling_params import SamplingParams

    config = engine_config(model, take_engine_options(options))
    as_json = options.pop("as_json")
    prompts = _prompts(options.pop("prompts"), options.pop("prompt_ids"))
    seed_given = context.get_parameter_source("seed") is not click.core.ParameterSource.DEFAULT
    params = SamplingParams(
        seed=config.seed if seed_given else None, stop=list(options.pop("stop")), **options
    )
    params.validate()
    with LLM(**msgspec.structs.asdict(config)) as llm:
        for output in llm.generate(prompts, params):
            _print(output, as_json)
    return 0


def _prompts(texts: tuple[str, ...], ids: tuple[str, ...]) -> list[str | list[int]]:
    prompts: list[str | list[int]] = [*texts, *map(_parse_ids, ids)]
    if not prompts:
        raise ConfigError("No prompt was given; give --prompt TEXT or --prompt-ids 1,2,3.")
    return prompts


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--prompt-ids {text!r} is not a list of token ids; give numbers as in 1,2,3."
        ) from None


def _print(output: RequestOutput, as_json: bool) -> None:
    if as_json:
        record = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
    else:
        print((output.prompt or "") + output.text, flush=True)
