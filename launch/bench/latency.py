"""`tp-runtime bench latency`: time of a token at a fixed batch, and how much of the memory's rate
it uses."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any, NamedTuple

import click

from tp_runtime.async_client import AsyncClient
from tp_runtime.errors import RequestFailedError
from tp_runtime.launch.bench.coordinator import int_list
from tp_runtime.launch.bench.copy_rate import measure_copy_rate
from tp_runtime.launch.bench.peers import BATCH_ONE, CONDITIONS
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.bench.settled import wait_until_settled
from tp_runtime.launch.bench.target import (
    POSITIVE,
    Target,
    llm_arguments,
    open_target,
    target_options,
)
from tp_runtime.launch.model_memory import DTYPE_BYTES, rank_memory
from tp_runtime.llm import LLM
from tp_runtime.sampling_params import SamplingParams


class Row(NamedTuple):
    """`ms_token`: whole call / new tokens. `ms_step`: from the token in the middle to the last one,
    by the tokens between, so without prefill. `gb_step`: weights of a rank and KV cache read by a
    step then."""

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
@click.option("--input-len", type=POSITIVE, default=1024, show_default=True, help="Prompt tokens.")
@click.option("--output-len", type=POSITIVE, default=256, show_default=True, help="New tokens.")
@click.option(
    "--repeats", type=POSITIVE, default=3, show_default=True, help="Calls of each; medians count."
)
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
            address = llm.client.address
            wait_until_settled(address)
            # The first call of all is no measure.
            measure(address, target, max(batches), input_len, min(8, output_len), 1)
            rows = [
                measure(address, target, size, input_len, output_len, repeats) for size in batches
            ]
    _print(target, rows, copy_rate)
    results = [{**row._asdict(), "gb_s": row.gb_s} for row in rows]
    conditions = {**target.conditions(), "copy_rate_gb_s": copy_rate and copy_rate / 1e9}
    print_json("latency", conditions, results)
    return 0


def measure(
    address: str, target: Target, batch: int, context: int, new_tokens: int, repeats: int
) -> Row:
    """Of the server at `address`; medians of `repeats` calls. Raises RequestFailedError when tokens
    are missing."""
    calls = [
        asyncio.run(_call(address, target, batch, context, new_tokens)) for _ in range(repeats)
    ]
    seconds, steps = zip(*calls, strict=True)
    late = (new_tokens // 2 + new_tokens) // 2
    return Row(
        batch,
        context,
        new_tokens,
        1000 * statistics.median(seconds) / new_tokens,
        1000 * statistics.median(steps),
        step_bytes(target, batch, context + late) / 1e9,
    )


def step_bytes(target: Target, batch: int, context: int) -> int:
    """Read by the fullest rank in one decode step of `batch` rows that see `context` tokens. Of an
    embedding table that is not also the head only a few rows are read: it does not count."""
    ranks = target.config.tensor_parallel_size
    memory = rank_memory(target.model, ranks, DTYPE_BYTES[target.dtype])
    table = -(-target.model.vocab_size // ranks) * target.model.hidden_size
    unread = 0 if target.model.tie_word_embeddings else table * DTYPE_BYTES[target.dtype]
    return memory.weights - unread + batch * context * memory.kv_per_token


async def _call(
    address: str, target: Target, batch: int, context: int, new_tokens: int
) -> tuple[float, float]:
    """Seconds of the whole call, and of one of its later steps as the first row sees them."""
    draw = random.Random(batch)
    size = target.model.vocab_size
    prompts = [[draw.randrange(size) for _ in range(context)] for _ in range(batch)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new_tokens)
    async with AsyncClient(address) as client:
        started = time.perf_counter()
        others = [
            asyncio.ensure_future(client.generate(prompt, params, detokenize=False))
            for prompt in prompts[1:]
        ]
        arrivals, tokens = [(started, 0)], 0
        async for chunk in client.generate(prompts[0], params, stream=True, detokenize=False):
            tokens += len(chunk.token_ids)
            arrivals.append((time.perf_counter(), tokens))
        numbers = [tokens] + [len((await other).token_ids) for other in others]
        seconds = time.perf_counter() - started
    if any(number != new_tokens for number in numbers):
        raise RequestFailedError(f"A request gave fewer than {new_tokens} tokens.")
    return seconds, _late_step(arrivals)


def _late_step(arrivals: list[tuple[float, int]]) -> float:
    """Seconds of a step between the middle token and the last; arrivals: (when, tokens by then)."""
    last, total = arrivals[-1]
    middle, before = next((at, n) for at, n in arrivals if 2 * n >= total)
    if before == total:  # all came together
        middle, before = arrivals[0]
    return (last - middle) / (total - before)


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
