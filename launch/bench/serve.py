"""`tp-runtime bench serve`: clients over the socket; what each of them waits for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import click
import msgspec

from tp_runtime.async_client import AsyncClient
from tp_runtime.errors import ConfigError
from tp_runtime.launch.bench.null_server import NullServer
from tp_runtime.launch.bench.report import percentile, print_json, print_table
from tp_runtime.launch.bench.settled import wait_until_settled
from tp_runtime.launch.bench.target import POSITIVE, open_target, target_options
from tp_runtime.local_server import LocalServer
from tp_runtime.sampling_params import SamplingParams

_START_S = 120.0
_LOOK_S = 0.05
_TOO_FEW = (
    "The rows of --background do not all run at the same time; give fewer, or more with "
    "--max-num-seqs, --num-kv-blocks and --max-model-len."
)
_QUEUE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


class Load(NamedTuple):
    """`rate`: arrivals per second (Poisson); 0: `clients` that each send the next request when the
    last has ended. `stagger`: each of them sends one before, of a part of the length, and goes on
    until the others are done; neither is measured. `background`: rows that decode all the time,
    before and beside."""

    requests: int
    rate: float
    clients: int
    stagger: bool
    background: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int = 0

    def prompt(self, number: int) -> list[int]:
        draw = random.Random(self.seed * 1_000_003 + number)
        return [draw.randrange(min(self.vocab_size, 10_000)) for _ in range(self.input_len)]


class Served(NamedTuple):
    """Seconds. `started`: on the clock of time.perf_counter. `gaps`: between tokens; a chunk of k
    tokens is k gaps of equal length."""

    started: float
    first_token: float
    queue: float
    total: float
    gaps: list[float]
    tokens: int


@click.command("serve")
@target_options
@click.option("--address", default="", help="A server that runs already, instead of a model.")
@click.option("--null-workers", is_flag=True, help="No model: workers that only take time.")
@click.option("--null-step-ms", default=5.0, show_default=True, help="Time of their steps.")
@click.option("--num-requests", type=POSITIVE, default=128, show_default=True)
@click.option(
    "--rate",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Arrivals per second; otherwise a closed loop.",
)
@click.option("--clients", type=POSITIVE, default=8, show_default=True, help="Of the closed loop.")
@click.option(
    "--stagger",
    is_flag=True,
    help="Clients of the closed loop out of phase, as after hours; else all begin at once.",
)
@click.option("--background", default=0, help="Rows that decode all the while, not measured.")
@click.option("--input-len", type=POSITIVE, default=128, show_default=True, help="Prompt tokens.")
@click.option("--output-len", type=POSITIVE, default=1024, show_default=True, help="New tokens.")
def serve_command(
    model: str | None,
    address: str,
    null_workers: bool,
    null_step_ms: float,
    **options: Any,
) -> int:
    """Time to the first token, between tokens, and in the queue, over the socket."""
    if options["rate"] and options["stagger"]:
        raise ConfigError("--stagger is for the clients of a closed loop; leave --rate out.")
    names = ("num_requests", "rate", "clients", "stagger", "background", "input_len", "output_len")
    load = {name: options.pop(name) for name in names}
    null = null_step_ms if null_workers else None
    with _server(model, address, null, load["background"], options) as server:
        conditions, where = server
        wait_until_settled(where)
        served, info = asyncio.run(_measure(where, *load.values()))
    conditions |= {
        **load,
        "tensor_parallel_size": info.tensor_parallel_size,
        "dtype": conditions.get("dtype", info.dtype),
    }
    results = summary(served)
    _print(results, "at least " if load["stagger"] or load["background"] else "")
    _print_queue([each.queue for each in served])
    print_json("serve", conditions, results)
    return 0


@contextlib.contextmanager
def _server(
    model: str | None,
    address: str,
    null_step_ms: float | None,
    background: int,
    options: dict[str, Any],
) -> Iterator[tuple[dict[str, Any], str]]:
    """Conditions, and the address to connect to."""
    if address:
        yield {"server": address}, address
        return
    if null_step_ms is not None and not model and not options["shape"]:
        options["shape"] = "tiny"
    with open_target(model, options) as target:
        if target.config.max_num_seqs <= background:
            raise ConfigError(
                f"--background {background} leaves no room beside it in a batch of --max-num-seqs "
                f"{target.config.max_num_seqs}; give more, or a smaller background."
            )
        if null_step_ms is not None:
            config = msgspec.structs.replace(
                target.config, num_kv_blocks=target.config.num_kv_blocks or 1 << 16
            )
            with NullServer(config, int(1000 * null_step_ms)) as null:
                yield {"workers": "null", "step_ms": null_step_ms, "dtype": None}, null.address
            return
        server = LocalServer(target.config)
        try:
            yield target.conditions(), server.wait_ready().address
        finally:
            server.close()


async def _measure(
    address: str,
    requests: int,
    rate: float,
    clients: int,
    stagger: bool,
    background: int,
    input_len: int,
    output_len: int,
) -> tuple[list[Served], Any]:
    async with AsyncClient(address) as client:
        info = await client.info()
        sizes = (input_len, output_len, info.vocab_size)
        load = Load(requests, rate, clients, stagger, background, *sizes)
        async with _background(client, load, info.max_model_len):
            served = await (_open_loop if rate else _closed_loop)(client, load)
    return served, info


@contextlib.asynccontextmanager
async def _background(client: AsyncClient, load: Load, longest: int) -> AsyncIterator[None]:
    """Rows in steady decode, all of them running when this is entered. Nobody reads along: that
    would measure the reader. Raises ConfigError when they do not all run at the same time."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=longest - load.input_len)
    rows = [
        asyncio.ensure_future(client.generate(load.prompt(-1 - i), params, detokenize=False))
        for i in range(load.background)
    ]
    try:
        await _all_decode(client, rows)
        yield
    finally:
        for row in rows:
            row.cancel()
        await asyncio.gather(*rows, return_exceptions=True)


async def _all_decode(client: AsyncClient, rows: Sequence[asyncio.Future[Any]]) -> None:
    deadline = time.monotonic() + _START_S
    steps = -1.0
    while rows:
        stats = (await client.info()).stats  # empty at the very beginning
        full = stats.get("running", 0.0) >= len(rows) and not stats["waiting"]
        if full and 0 <= steps < stats["steps"]:
            return
        steps = stats["steps"] if full else -1.0
        for row in rows:
            if row.done():
                row.result()  # why it could not run
                raise ConfigError(_TOO_FEW)
        if time.monotonic() > deadline:
            raise ConfigError(_TOO_FEW)
        await asyncio.sleep(_LOOK_S)


async def _closed_loop(client: AsyncClient, load: Load) -> list[Served]:
    numbers = iter(range(load.requests))
    # Evenly spread, in an order of its own: clients that begin together do not end one by one.
    parts = random.Random(load.seed).sample(range(1, load.clients + 1), load.clients)

    served: list[Served] = []

    async def one_client(part: int) -> None:
        if load.stagger:
            length = max(1, load.output_len * part // load.clients)
            await _request(client, load._replace(output_len=length), -part)
        for number in numbers:
            served.append(await _request(client, load, number))
        while load.stagger and len(served) < load.requests:
            await _request(client, load, -part)

    await _until(lambda: len(served) == load.requests, [one_client(part) for part in parts])
    return served


async def _until(done: Callable[[], bool], clients: list[Coroutine[Any, Any, None]]) -> None:
    """Runs the clients until all have ended, or, once `done`, ends them. Raises what one raises."""
    tasks = {asyncio.ensure_future(each) for each in clients}
    try:
        while tasks and not done():
            ended, tasks = await asyncio.wait(tasks, timeout=_LOOK_S)
            for task in ended:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _open_loop(client: AsyncClient, load: Load) -> list[Served]:
    draw = random.Random(load.seed)
    tasks = []
    for number in range(load.requests):
        tasks.append(asyncio.create_task(_request(client, load, number)))
        await asyncio.sleep(draw.expovariate(load.rate))
    return list(await asyncio.gather(*tasks))


async def _request(client: AsyncClient, load: Load, number: int) -> Served:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=load.output_len)
    prompt = load.prompt(number)
    started = before = time.perf_counter()
    first, tokens = 0.0, 0
    gaps: list[float] = []
    stream = client.generate(prompt, params, stream=True, detokenize=False)
    async for chunk in stream:
        now = time.perf_counter()
        count = len(chunk.token_ids)
        if not tokens and count:
            first = now - started
        elif count:
            gaps += [(now - before) / count] * count
        tokens += count
        before = now
    queue = stream.output.timings.queue_s
    return Served(started, first, queue, before - started, gaps, tokens)


def summary(served: list[Served]) -> dict[str, Any]:
    """Milliseconds at 50, 95 and 99 percent, and tokens per second of all together, from the first
    request's start to the last one's end; of others that run beside them nothing is here."""
    parts = {
        "ttft_ms": [each.first_token for each in served],
        "inter_token_ms": [gap for each in served for gap in each.gaps],
        "queue_ms": [each.queue for each in served],
        "request_ms": [each.total for each in served],
    }
    found: dict[str, Any] = {
        name: {f"p{p}": 1000 * percentile(values, p) for p in (50, 95, 99)}
        for name, values in parts.items()
    }
    found["queue_ms"]["max"] = 1000 * max(parts["queue_ms"], default=0.0)
    found["requests"] = len(served)
    ended = max(each.started + each.total for each in served)
    seconds = ended - min(each.started for each in served)
    found["tok_s"] = sum(each.tokens for each in served) / seconds
    return found


def _print(results: dict[str, Any], bound: str) -> None:
    """`bound`: what stands before the tokens per second when other requests ran beside."""
    rows = [
        [name.removesuffix("_ms"), *(results[name][p] for p in ("p50", "p95", "p99"))]
        for name in ("ttft_ms", "inter_token_ms", "queue_ms", "request_ms")
    ]
    print_table(["ms", "p50", "p95", "p99"], rows)
    print(f"{results['requests']} requests, {bound}{results['tok_s']:,.1f} tokens/s")
    gap = results["inter_token_ms"]["p50"]
    if gap:
        steps = results["queue_ms"]["max"] / gap
        print(f"Longest wait in the queue: {results['queue_ms']['max']:.1f} ms, {steps:.1f} steps")


def _print_queue(queue: list[float]) -> None:
    """How long arrivals waited before their first computation."""
    counts = [0] * (len(_QUEUE_BOUNDS_MS) + 1)
    for seconds in queue:
        counts[sum(1000 * seconds > bound for bound in _QUEUE_BOUNDS_MS)] += 1
    print("\nWait in the queue")
    labels = [f"<= {bound} ms" for bound in _QUEUE_BOUNDS_MS] + ["more"]
    for label, count in zip(labels, counts, strict=True):
        if count:
            print(f"{label:>10}  {count:6}  {'#' * max(1, 50 * count // len(queue))}")
