"""The command `tp-runtime demo`: a real model on two worker processes, from nothing to an answer.

It prepares SmolLM2-135M-Instruct (9 query and 3 KV heads, so the two shards are uneven), starts a
server with two ranks and one with a single rank, connects the Python client, streams the answer to
a question, and asks both: the tokens must be the same.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tp_runtime.launch import exit_status
from tp_runtime.launch.demo_model import demo_model_folder
from tp_runtime.launch.gpus import Gpus

if TYPE_CHECKING:
    from tp_runtime.client import Client, TokenStream
    from tp_runtime.llm import LLM

QUESTION = "What is the capital of France, and what is it known for?"


@dataclass(frozen=True)
class Answer:
    """What one server said, and how fast: tokens per second after the first token."""

    token_ids: list[int]
    first_token_s: float
    tokens_per_s: float


@click.command("demo")
@click.option("--model", default="", help="A folder or hub name instead of SmolLM2-135M-Instruct.")
@click.option("--question", default=QUESTION, show_default=True, help="What to ask.")
@click.option("-tp", "--tensor-parallel-size", "ranks", default=2, show_default=True)
@click.option("--max-tokens", default=16, show_default=True, help="Most tokens of the answer.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="In float32 the number of ranks does not show in the tokens.",
)
def demo_command(
    model: str, question: str, ranks: int, max_tokens: int, device: str, dtype: str
) -> int:
    """Run a small real model on two workers: needs no GPU and no download by hand."""
    from tp_runtime.llm import LLM

    folder = model or str(demo_model_folder(_say))
    device = _device(device, ranks)
    settings: dict[str, Any] = {"device": device, "dtype": dtype, "cpu_kv_cache_gib": 0.25}
    _say(f"Starting {folder} on {ranks} {device} workers, and on 1 to compare with")
    started = time.monotonic()
    # Together: each start is mostly one core importing torch.
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        starts = [
            threads.submit(LLM, folder, tensor_parallel_size=size, **settings)
            for size in (ranks, 1)
        ]
        both = [stack.enter_context(start.result()) for start in starts]
        _say(f"Ready after {time.monotonic() - started:.1f} s; asking: {question}\n")
        several = _read(_stream(both[0], question, max_tokens), show=True)
        _say(
            f"{len(several.token_ids)} tokens, the first after {several.first_token_s:.2f} s, then "
            f"{several.tokens_per_s:.1f} tokens/s on {ranks} workers"
        )
        one = _read(_stream(both[1], question, max_tokens), show=False)
    if one.token_ids != several.token_ids:
        return _differ(one.token_ids, several.token_ids, ranks)
    _say(
        f"1 worker gives the same {len(one.token_ids)} tokens as {ranks} "
        f"({one.tokens_per_s:.1f} tokens/s)"
    )
    return exit_status.OK


def _stream(llm: LLM, question: str, max_tokens: int) -> TokenStream:
    """As a chat where the model has a template for it, as plain text to go on with where not."""
    client: Client = llm.client
    if client.info().has_chat_template:
        messages = [{"role": "user", "content": question}]
        stream: TokenStream = client.chat(
            messages, temperature=0.0, max_tokens=max_tokens, stream=True
        )
        return stream
    return client.generate(question, temperature=0.0, max_tokens=max_tokens, stream=True)


def _read(stream: TokenStream, show: bool) -> Answer:
    started, first = time.monotonic(), 0.0
    count = 0
    for chunk in stream:
        first = first or time.monotonic()
        count += len(chunk.token_ids)
        if show:
            print(chunk.text, end="", flush=True)
    if show:
        print("\n", flush=True)
    seconds = max(time.monotonic() - first, 1e-6)
    return Answer(stream.output.token_ids, first - started, max(count - 1, 0) / seconds)


def _differ(one: list[int], several: list[int], ranks: int) -> int:
    same = next(
        (i for i, (a, b) in enumerate(zip(one, several, strict=False)) if a != b),
        min(len(one), len(several)),
    )
    _say(
        f"1 and {ranks} workers differ from token {same} on; in float32 that is a fault of this "
        "runtime, please report it (in bfloat16 near-ties may do it)"
    )
    return exit_status.FAILED


def _device(device: str, ranks: int) -> str:
    if device != "auto":
        return device
    return "cuda" if Gpus.seen().visible >= ranks else "cpu"


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)
