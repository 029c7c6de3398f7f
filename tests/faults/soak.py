"""Random arrivals, cancels and kills for some minutes, then a look at what is left.

    python -m tests.faults.soak --minutes 20

Every answer is compared with the undisturbed one. At the end, with nothing running, the blocks in
use, the open files and the memory of coordinator and keepers are compared with those at the start.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.fault_server import FaultServer, fault_server, serve
from tests.tiny_models import make_tiny
from tp_runtime import Client, PendingOutput, SamplingParams
from tp_runtime.errors import RequestCancelledError, TPRuntimeError
from tp_runtime.run_folder import ProcessId

MOST_RUNNING = 24
KINDS = 32
"""Different requests; each is asked for again and again."""
MEMORY_BYTES = 24 << 20
"""Growth that is allowed: caches of the allocator and of Python, which do not grow further."""
RESTART_WINDOW_S = 4.0
"""Faults are further apart than crashes that make the requests in them suspects: three faults from
outside that meet the same request would rightly convict it."""
FAULTS = ("worker kill", "worker stop", "worker abort", "worker raise", "coordinator kill")
WEIGHTS = (4, 1, 2, 2, 1)


def request(i: int) -> tuple[list[int], SamplingParams]:
    draw = random.Random(i)
    prompt = [draw.randrange(5, 250) for _ in range(draw.choice((1, 3, 16, 17, 90)))]
    sampling: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}
    if i % 5 == 0:
        sampling["repetition_penalty"] = 1.2
    return prompt, SamplingParams(ignore_eos=True, max_tokens=draw.randrange(1, 120), **sampling)


class Soak:
    """One server under load; `counts` says what happened."""

    def __init__(self, server: FaultServer, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.client = Client(server.address, reconnect_timeout=120)
        self.counts: Counter[str] = Counter()
        self.running: list[tuple[int, PendingOutput, bool]] = []
        self._planned: Callable[[], float | None] = lambda: 0.0
        self.wanted = [self._ask(i).result(120).token_ids for i in range(KINDS)]

    def _ask(self, i: int) -> PendingOutput:
        prompt, params = request(i)
        return self.client.submit(prompt, params, timeout=300)

    def run(self, seconds: float, kills_every_s: float) -> None:
        end = time.monotonic() + seconds
        next_kill = calm_since = time.monotonic()
        next_kill += kills_every_s
        while time.monotonic() < end:
            if self.server.state() != "ready" or self._is_to_come():
                calm_since = time.monotonic()
            if len(self.running) < MOST_RUNNING and self.random.random() < 0.3:
                i = self.random.randrange(KINDS)
                self.running.append((i, self._ask(i), self.random.random() < 0.1))
            calm_s = time.monotonic() - calm_since
            if time.monotonic() >= next_kill and calm_s > RESTART_WINDOW_S:
                next_kill = time.monotonic() + self.random.uniform(0.5, 1.5) * kills_every_s
                self._fault(self.random.choices(FAULTS, WEIGHTS)[0])
                calm_since = time.monotonic()
            self._collect()
            time.sleep(0.01)

    def _is_to_come(self) -> bool:
        """Whether a planted fault has not met its step yet."""
        return self._planned() is None

    def _collect(self) -> None:
        still = []
        for i, pending, to_cancel in self.running:
            if to_cancel and pending.num_tokens:
                pending.cancel()
            if pending.done():
                self._check(i, pending)
            else:
                still.append((i, pending, to_cancel))
        self.running = still

    def _check(self, i: int, pending: PendingOutput) -> None:
        try:
            right = pending.result(0).token_ids == self.wanted[i]
            self.counts["answers" if right else "WRONG ANSWERS"] += 1
        except RequestCancelledError:
            self.counts["cancelled"] += 1
        except TPRuntimeError as error:
            self.counts[f"FAILED: {error.code}"] += 1
            print(f"request {i} failed: {error}", file=sys.stderr)

    def _fault(self, fault: str) -> None:
        victim, action = fault.split()
        workers = self.server.workers()
        if len(workers) < 2:
            return  # they are being replaced
        if victim == "coordinator":
            self.server.send(self.server.coordinator, action)
        elif action in ("kill", "stop"):
            self.server.send(self.random.choice(workers), action)
        else:
            self._planned = self.server.plan(self.random.randrange(2), "decode", action)
        self.counts[fault] += 1

    def drain(self) -> None:
        deadline = time.monotonic() + 180
        while self.running and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.02)
        self.counts["NOT ENDED"] += len(self.running)
        self.server.wait_ready(120)
        time.sleep(1.0)  # a client that has gone is noticed within a second

    def holdings(self) -> dict[str, int]:
        """What the server holds while nothing runs."""
        stats = self.client.info().stats
        held = {"kv blocks used": int(stats["kv_blocks_used"]), "shm files": len(_shm())}
        processes = [("coordinator", self.server.coordinator)]
        processes += [(f"keeper {i}", keeper) for i, keeper in enumerate(self.server.keepers())]
        for name, process in processes:
            held[f"{name} open files"] = len(os.listdir(f"/proc/{process.pid}/fd"))
            held[f"{name} memory"] = memory_bytes(process)
        return held


def memory_bytes(process: ProcessId) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _shm() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "tp_runtime" in name]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kills-every", type=float, default=8.0, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-deadline", type=float, default=3.0, help="more on a busy machine")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpr_") as folder:
        os.environ.update(XDG_RUNTIME_DIR=folder, TP_RUNTIME_HTTP="0", HF_HUB_OFFLINE="1")
        tiny = str(make_tiny("qwen3", Path(folder) / "tiny"))
        command = serve(
            tiny,
            "--step-deadline",
            str(given.step_deadline),
            "--restart-window",
            str(RESTART_WINDOW_S),
        )
        with fault_server(Path(folder), *command) as server:
            soak = Soak(server, given.seed)
            # Everything once, the restart of all parts too, before it is measured.
            soak.run(20.0, 4.0)
            soak.drain()
            before = soak.holdings()
            soak.run(60.0 * given.minutes, given.kills_every)
            soak.drain()
            after = soak.holdings()
            soak.client.close()
    return report(soak.counts, before, after)


def report(counts: Counter[str], before: dict[str, int], after: dict[str, int]) -> int:
    wrong = sum(number for name, number in counts.items() if name.isupper() or "FAILED" in name)
    for name, number in sorted(counts.items()):
        print(f"{name:40} {number}")
    for name, value in after.items():
        allowed = MEMORY_BYTES if "memory" in name else 2 if "open files" in name else 0
        bad = value - before[name] > allowed
        wrong += bad
        print(f"{name:40} {before[name]} -> {value}{'  GREW' if bad else ''}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
