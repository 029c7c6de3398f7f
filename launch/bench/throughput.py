"""`tp-runtime bench throughput`: 256 prompts at once, generated tokens per second."""

from __future__ import annotations

import time
from typing import Any

import click

from tp_runtime.errors import RequestFailedError
from tp_runtime.launch.bench.peers import CONDITIONS, THROUGHPUT
from tp_runtime.launch.bench.reference_check import TOKENS, check_against_reference
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.bench.settled import wait_until_settled
from tp_runtime.launch.bench.target import Target, llm_arguments, open_target, target_options
from tp_runtime.launch.bench.workload import (
    GENERATED_TOKENS,
    MAX_MODEL_LEN,
    NUM_PROMPTS,
    Workload,
    check_vocabulary,
    make_workload,
)
from tp_runtime.llm import LLM

RUNS = 2


@click.command("throughput")
@target_options
@click.option("--num-prompts", default=NUM_PROMPTS, show_default=True, help="Fewer, for a trial.")
@click.option("--check", "to_check", default=0, help="Compare so many prompts first.")
def throughput_command(model: str | None, num_prompts: int, to_check: int, **options: Any) -> int:
    """nano-vllm's workload: seed 0, prompts and answers of 100 to 1024 tokens, temperature 0.6.

    With --check N the first N prompts are compared with the eager reference before anything is
    timed; when they differ no figure is printed. It takes the place of the server's flag."""
    forced: dict[str, Any] = {"enable_prefix_caching": False}
    if options.get("max_model_len") is None:
        forced["max_model_len"] = MAX_MODEL_LEN
    with open_target(model, options, **forced) as target:
        check_vocabulary(target.model.vocab_size)
        work = make_workload().first(num_prompts)
        conditions = {**target.conditions(), "num_prompts": len(work.prompts)}
        if to_check:
            found = check_against_reference(
                target.config, work.prompts[:to_check], target.dtype, max_num_seqs=to_check
            )
            conditions["check"] = found._asdict()
            print(
                f"check: {found.compared} of {to_check * TOKENS} greedy tokens compared with the "
                f"eager reference, {found.near_ties} near ties, log-probabilities within "
                f"{found.largest:.2g}"
            )
        seconds = _run(target, work)
    _print(target, work, seconds)
    rates = [work.generated_tokens / s for s in seconds]
    results = {"seconds": seconds, "generated_tok_s": rates, "tokens": work.generated_tokens}
    print_json("throughput", conditions, results)
    return 0


def _run(target: Target, work: Workload) -> list[float]:
    """Seconds of each run; all requests are given at once. Raises RequestFailedError when tokens
    are missing."""
    seconds = []
    params = work.params()
    with LLM(**llm_arguments(target.config)) as llm:
        wait_until_settled(llm.client.address)
        for _ in range(RUNS):
            started = time.perf_counter()
            outputs = llm.generate(
                prompt_token_ids=work.prompts,
                sampling_params=params,
                detokenize=False,
                use_tqdm=False,
            )
            seconds.append(time.perf_counter() - started)
            count = sum(len(output.token_ids) for output in outputs)
            wanted = work.generated_tokens
            if len(work.prompts) == NUM_PROMPTS and wanted != GENERATED_TOKENS:
                raise RequestFailedError(
                    f"The workload has {wanted} tokens, not the agreed number."
                )
            if count != wanted:
                raise RequestFailedError(f"{count} tokens were generated; {wanted} were asked for.")
    return seconds


def _print(target: Target, work: Workload, seconds: list[float]) -> None:
    size = target.config.tensor_parallel_size
    peer = THROUGHPUT.get((target.name, size)) if len(work.prompts) == NUM_PROMPTS else None
    head = ["run", "model", "dtype", "TP", "prompt tok", "new tok", "s", "new tok/s"]
    head += ["% of limit", "nano-vllm", "vLLM", "goal"]
    rows = []
    for run, s in enumerate(seconds, 1):
        rate = work.generated_tokens / s
        row = [run, target.name, target.dtype, size, work.prompt_tokens, work.generated_tokens]
        beside = (
            [100 * rate / peer.limit, peer.nano_vllm, peer.vllm, peer.goal] if peer else [None] * 4
        )
        rows.append([*row, s, rate, *beside])
    print_table(head, rows)
    if peer:
        print(CONDITIONS)
