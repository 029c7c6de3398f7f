"""`tp-runtime bench latency`: time of a token at a fixed batch, and how much of the memory's rate
it uses."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, NamedTuple

import click

from tp_runtime.errors import RequestFailedError
from tp_runtime.launch.bench.coordinator import int_list
from tp_runtime.launch.bench.copy_rate import measure_copy_rate
from tp_runtime.launch.bench.peers import BATCH_ONE, CONDITIONS
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.bench.target import Target, llm_arguments, open_target, target_options
from tp_runtime.launch.model_memory import DTYPE_BYTES, rank_memory
from tp_runtime.llm import LLM
from tp_runtime.sampling_params import SamplingParams


class Row(NamedTuple):
    """`ms_token`: whole call / new tokens. `ms_step`: whole calls of two lengths, difference /
    difference, so without prefill. `gb_step`: weights of a rank and KV cache read by a step."""

    batch: int
    context: int
    new_tokens: int
    ms_token: float
    ms_step: float
    gb_step: float

    @property
    def gb_s(self) -> float:
        return self.gb_step / self.ms_step * 1000


@click.command("latency")
@target_options
@click.option("--batch", default="1,8,32", show_default=True, help="Batch sizes.")
@click.option("--input-len", default=1024, show_default=True, help="Prompt tokens.")
@click.option("--output-len", default=256, show_default=True, help="New tokens.")
@click.option("--repeats", default=3, show_default=True, help="Calls of each; the median counts.")
def latency_command(
    model: str | None, batch: str, input_len: int, output_len: int, repeats: int, **options: Any
) -> int:
    """Greedy decoding of equal prompts' lengths, nothing else running, prefix cache off."""
    batches = int_list(batch)
    forced: dict[str, Any] = {"enable_prefix_caching": False}
    forced["max_num_seqs"] = max(batches)
    if options.get("max_model_len") is None:
        forced["max_model_len"] = input_len + output_len
    with open_target(model, options, **forced) as target:
        copy_rate = measure_copy_rate() if target.config.device == "cuda" else None
        with LLM(**llm_arguments(target.config)) as llm:
            _call(
                llm, target, max(batches), input_len, min(8, output_len)
            )  # the first call of all is no measure
            rows = [measure(llm, target, size, input_len, output_len, repeats) for size in batches]
    _print(target, rows, copy_rate)
    results = [{**row._asdict(), "gb_s": row.gb_s} for row in rows]
    conditions = {**target.conditions(), "copy_rate_gb_s": copy_rate and copy_rate / 1e9}
    print_json("latency", conditions, results)
    return 0


def measure(
    llm: LLM, target: Target, batch: int, context: int, new_tokens: int, repeats: int
) -> Row:
    """Raises RequestFailedError when tokens are missing."""
    half = max(1, new_tokens // 2)
    long = statistics.median(_call(llm, target, batch, context, new_tokens) for _ in range(repeats))
    short = statistics.median(_call(llm, target, batch, context, half) for _ in range(repeats))
    step = (long - short) / max(1, new_tokens - half)
    return Row(
        batch,
        context,
        new_tokens,
        1000 * long / new_tokens,
        1000 * step,
        step_bytes(target, batch, context + (half + new_tokens) // 2) / 1e9,
    )


def step_bytes(target: Target, batch: int, context: int) -> int:
    """Read by the fullest rank in one decode step of `batch` rows that see `context` tokens. Of an
    embedding table that is not also the head only a few rows are read: it does not count."""
    ranks = target.config.tensor_parallel_size
    memory = rank_memory(target.model, ranks, DTYPE_BYTES[target.dtype])
    table = -(-target.model.vocab_size // ranks) * target.model.hidden_size
    unread = 0 if target.model.tie_word_embeddings else table * DTYPE_BYTES[target.dtype]
    return memory.weights - unread + batch * context * memory.kv_per_token


def _call(llm: LLM, target: Target, batch: int, context: int, new_tokens: int) -> float:
    """Seconds of one call."""
    draw = random.Random(batch)
    size = target.model.vocab_size
    prompts = [[draw.randrange(size) for _ in range(context)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new_tokens)
    started = time.perf_counter()
    outputs = llm.generate(
        prompt_token_ids=prompts, sampling_params=params, detokenize=False, use_tqdm=False
    )
    seconds = time.perf_counter() - started
    if any(len(output.token_ids) != new_tokens for output in outputs):
        raise RequestFailedError(f"A request gave fewer than {new_tokens} tokens.")
    return seconds


def _print(target: Target, rows: list[Row], copy_rate: float | None) -> None:
    size = target.config.tensor_parallel_size
    head = ["model", "dtype", "TP", "batch", "context", "new", "ms/token", "ms/step", "GB/s"]
    head += ["% of copy rate", "nano-vllm", "vLLM", "goal"]
    table = []
    for row in rows:
        peer = BATCH_ONE.get((target.name, size)) if row.batch == 1 else None
        percent = 100 * row.gb_s * 1e9 / copy_rate if copy_rate else None
        beside = [peer.nano_vllm, peer.vllm, peer.goal] if peer else [None] * 3
        table.append([target.name, target.dtype, size, *row[:5], row.gb_s, percent, *beside])
    print_table(head, table)
    if copy_rate:
        print(f"Copy rate of the GPU in this run: {copy_rate / 1e12:.2f} TB/s. {CONDITIONS};")
        print("their batch 1 is ms per token of a whole call with 256 new tokens.")
