"""`tp-runtime bench coordinator`: what a step costs before any GPU is asked.

Null workers answer at once; one ZeroMQ client streams all rows in batched frames, without text. End
ids and lengths are checked, the garbage collector is set as in production, the prefix cache is on.
"""

from __future__ import annotations

import contextlib
import io
import json
import pstats
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch.bench.null_rank import BLOCK_SIZE
from tp_runtime.launch.bench.null_server import NullServer
from tp_runtime.launch.bench.process_figures import resident_bytes, thread_seconds
from tp_runtime.launch.bench.raw_stream import RawStream
from tp_runtime.launch.bench.report import print_json, print_table
from tp_runtime.launch.bench.shapes import shape_folder
from tp_runtime.launch.bench.step_times import StepTimes, read_step_times
from tp_runtime.messages import Generate
from tp_runtime.sampling_params import SamplingParams

RUN_AHEAD = 8
SHORT_WINDOW = 2
"""What the scheduler keeps to while a row can meet an end id."""
_SETTLE_TOKENS = 30
_FILL_S = 600.0
_LEAST_S = 0.5
"""Shortest time over which threads and steps are looked at."""
_MEMORY_TOKENS = 400
_SETTLED_STEPS = 4000
"""By then the prefix cache has filled the pool several times and the allocator has found its size:
a server grows by some 8 MB over its first 4,000 steps and by 3 MB over the next 12,000."""
_LONGEST = 1 << 17
"""Positions of the model whose config is used: null workers are quicker than any client, and no row
may end before the client has its first thousand tokens."""
_THREADS = ("engine", "output", "frontend", "tokenize")


class Case(NamedTuple):
    """`window` 2: rows may meet an end id; 8: they cannot."""

    rows: int
    context: int
    window: int
    steps: int

    def requests(self) -> Iterator[Generate]:
        params = SamplingParams(
            temperature=0.6,
            max_tokens=self.max_tokens,
            ignore_eos=self.window != SHORT_WINDOW,
        )
        for row in range(self.rows):
            yield Generate(
                f"row-{row}", params, prompt_token_ids=self.prompt(row), detokenize=False
            )

    def prompt(self, number: int) -> list[int]:
        return [(number * 7919 + i) % 100_000 + 1 for i in range(self.context)]

    @property
    def max_tokens(self) -> int:
        """More than is waited for: no row ends while it is measured."""
        fill = self.rows * self.context // _BATCHED_TOKENS
        return min(fill + 2 * self.steps + 40_000, _LONGEST - self.context)

    def config(self, folder: Path, trace: str) -> EngineConfig:
        length = self.context + self.max_tokens
        return EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            max_model_len=length,
            block_size=BLOCK_SIZE,
            num_kv_blocks=self.rows * (length // BLOCK_SIZE + 2),
            max_num_seqs=self.rows,
            max_num_batched_tokens=_BATCHED_TOKENS,
            run_ahead=RUN_AHEAD,
            trace=trace,
        )


_BATCHED_TOKENS = 8192


class Measured(NamedTuple):
    """`cpu`: share of a core by thread; `plan_bytes`: mean size of a plan."""

    case: Case
    times: StepTimes
    cpu: dict[str, float]
    plan_bytes: float

    def record(self) -> dict[str, Any]:
        return {
            **self.case._asdict(),
            **{f"{k}_ms" if k != "steps" else k: v for k, v in self.times._asdict().items()},
            "cpu": self.cpu,
            "plan_bytes": self.plan_bytes,
        }


@click.command("coordinator")
@click.option("--rows", default="1,64,256,512", show_default=True, help="Batch sizes.")
@click.option("--context", default="1024,32768", show_default=True, help="Prompt tokens.")
@click.option("--window", default="2,8", show_default=True, help="2: end ids; 8: none possible.")
@click.option("--steps", default=1000, show_default=True, help="Steady steps measured of each.")
@click.option("--memory-steps", default=10_000, show_default=True, help="0: no memory run.")
@click.option("--profile/--no-profile", default=True, help="Show where the engine's time goes.")
def coordinator_command(
    rows: str, context: str, window: str, steps: int, memory_steps: int, profile: bool
) -> int:
    """Time of the coordinator alone, against workers that answer at once."""
    cases = [
        Case(r, c, w, steps)
        for r in int_list(rows)
        for c in int_list(context)
        for w in int_list(window)
    ]
    measured = [measure(case) for case in cases]
    _print(measured)
    results: dict[str, Any] = {"cases": [each.record() for each in measured]}
    if memory_steps:
        growth = measure_memory(rows=64, steps=memory_steps)
        results["rss_growth_mb"] = growth
        print(f"\nRSS of the coordinator over {memory_steps:,} steps: {growth:+.2f} MB (goal < 5)")
    if profile:
        biggest = max(cases, key=lambda case: (case.rows == 256, -case.context, case.window == 2))
        print(f"\nEngine thread, {biggest.rows} rows, window {biggest.window}, under cProfile:")
        print(profile_text(biggest))
    conditions = {"dtype": None, "tensor_parallel_size": 1, "workers": "null", "gc": "production"}
    print_json("coordinator", conditions, results)
    return 0


@contextlib.contextmanager
def _long_model() -> Iterator[Path]:
    """A model folder whose sequences may be long."""
    with shape_folder("qwen3-8b") as folder:
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = _LONGEST
        (folder / "config.json").write_text(json.dumps(config))
        yield folder


def measure(case: Case) -> Measured:
    """Raises WorkerFailedError when the rows do not get their tokens."""
    with tempfile.TemporaryDirectory() as scratch, _long_model() as folder:
        trace = Path(scratch) / "trace.json"
        with NullServer(case.config(folder, str(trace))) as server:
            stream = RawStream(server.address)
            stream.submit(case.requests())
            stream.until_all_have(_SETTLE_TOKENS, _FILL_S)
            before, cpu, start = stream.stats(), thread_seconds(server.pid), time.monotonic()
            stream.until_all_have(min(stream.counts.values()) + case.steps, _FILL_S)
            while time.monotonic() < start + _LEAST_S:  # tokens of earlier steps may have come late
                stream.pump(_LEAST_S)
            end, after = time.monotonic(), stream.stats()
            cpu = {k: v - cpu.get(k, 0.0) for k, v in thread_seconds(server.pid).items()}
            stream.close()
        times = read_step_times(trace, start, end, case.window)
    plans = after["step_plan_bytes_count"] - before["step_plan_bytes_count"]
    size = after["step_plan_bytes_sum"] - before["step_plan_bytes_sum"]
    shares = {name: cpu.get(name, 0.0) / (end - start) for name in _THREADS}
    return Measured(case, times, shares, size / max(1, plans))


def measure_memory(rows: int, steps: int) -> float:
    """Growth in MB over so many steps in which requests end and others take their place. It is
    counted from step `_SETTLED_STEPS` on."""
    case = Case(rows, context=512, window=SHORT_WINDOW, steps=0)
    params = SamplingParams(max_tokens=_MEMORY_TOKENS)
    with (
        _long_model() as folder,
        NullServer(_memory_config(case, folder)) as server,
    ):
        stream, number = RawStream(server.address), 0
        waiting, started, at_start = rows, 0.0, 0.0
        while True:
            stream.submit(
                Generate(f"request-{n}", params, prompt_token_ids=case.prompt(n), detokenize=False)
                for n in range(number, number + waiting)
            )
            number += waiting
            stream.pump()
            waiting = len(stream.ended)
            for name in stream.ended:
                del stream.counts[name]
            stream.ended.clear()
            done = stream.stats(wait_s=0.0).get("steps", 0.0)
            if not started and done >= min(steps, _SETTLED_STEPS):
                started, at_start = done, resident_bytes(server.pid)
            if started and done >= started + steps:
                growth = (resident_bytes(server.pid) - at_start) / 1e6
                stream.close()
                return growth


def _memory_config(case: Case, folder: Path) -> EngineConfig:
    blocks = -(-(case.context + _MEMORY_TOKENS) // BLOCK_SIZE) + 2
    return msgspec.structs.replace(case.config(folder, ""), num_kv_blocks=case.rows * blocks)


def profile_text(case: Case, lines: int = 18) -> str:
    """The engine thread's functions by own time while `case` runs."""
    with tempfile.TemporaryDirectory() as scratch, _long_model() as folder:
        file = str(Path(scratch) / "profile")
        with NullServer(case.config(folder, ""), profile=file) as server:
            stream = RawStream(server.address)
            stream.submit(case.requests())
            stream.until_all_have(_SETTLE_TOKENS + case.steps, _FILL_S)
            stream.close()
        text = io.StringIO()
        pstats.Stats(file, stream=text).strip_dirs().sort_stats("tottime").print_stats(lines)
    return text.getvalue().partition("ncalls")[2].rstrip()


def _print(measured: list[Measured]) -> None:
    head = ["rows", "context", "window", "ms/step", "turn p50", "turn p99", "plan", "publish"]
    head += ["commit", "plan B", "engine", "output", "frontend"]
    print_table(
        head,
        [
            [
                *(m.case.rows, m.case.context, m.case.window),
                *(m.times.period, m.times.turn_p50, m.times.turn_p99),
                *(m.times.plan, m.times.publish, m.times.commit, m.plan_bytes),
                *(f"{m.cpu[name]:.0%}" for name in ("engine", "output", "frontend")),
            ]
            for m in measured
        ],
    )
    print("\nTimes in ms; turn: receipt of a step's ids to publication of the next plan; the last")
    print("columns are shares of a core. Goals at 256 rows: 1.0 ms a step, 0.3 with window 8.")


def int_list(text: str) -> list[int]:
    """`1,64,256` to numbers, 1 or more each; raises click.BadParameter."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is no list of numbers, 1 or more, such as 1,64,256.")
    return numbers
