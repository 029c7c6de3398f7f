"""One rank of `tp-runtime bench comm`: joins the group as a worker does, and times collectives."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tp_runtime.engine_config import EngineConfig
from tp_runtime.launch.rank_environment import RankPlace, prepare_imports

if TYPE_CHECKING:
    import torch

    from tp_runtime.ops.group import TPGroup

_PER_GRAPH = 20
"""Calls recorded into one graph, so that its launch does not count."""
_JOIN_S = 60.0
_HIDDEN = 4096
"""Elements of a row in the one-shot and two-shot columns: 8 KiB, Qwen3-8B's."""


def main() -> None:
    """Rank 0 prints the times as JSON."""
    order = json.loads(sys.argv[1])
    place = RankPlace.from_environment()
    prepare_imports(os.environ, place)
    import torch

    from tp_runtime.workers.device import choose_device, join_group

    config = EngineConfig(model="", device=order["device"])
    device = choose_device(config, place.local_rank)
    torch.set_num_threads(1)
    group = join_group(device, place.rank, place.world_size, 0, _JOIN_S)
    ways = _ways(group, device)
    rows = [_row(group, ways, device, size, order["iterations"]) for size in order["sizes"]]
    if place.rank == 0:
        print(json.dumps(rows), flush=True)
    group.comm.barrier()
    group.comm.close()


def _ways(group: TPGroup, device: torch.device) -> dict[str, TPGroup | None]:
    """By the name of its columns, the group with sums over symmetric memory that all go this way;
    None where they cannot be had. Empty without GPUs."""
    import torch

    from tp_runtime.ops.sum_way import one_shot_only, two_shot_only
    from tp_runtime.ops.symmetric import with_symmetric_memory

    if device.type != "cuda":
        return {}
    ways: dict[str, TPGroup | None] = {}
    for name, choose in (("one-shot", one_shot_only), ("two-shot", two_shot_only)):
        fast, reason = with_symmetric_memory(group, _HIDDEN, torch.bfloat16, device, choose)
        if reason and group.rank == 0:
            print(f"No {name} sums: {reason}.", file=sys.stderr)
        ways[name] = None if reason else fast
    return ways


def _row(
    group: TPGroup,
    ways: dict[str, TPGroup | None],
    device: torch.device,
    size: int,
    iterations: int,
) -> dict[str, Any]:
    import torch

    x = torch.ones(max(1, size // 2), dtype=torch.bfloat16, device=device)
    comm = group.comm
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_gather": lambda: comm.all_gather(x),
        "gather": lambda: comm.gather(x),
        "broadcast": lambda: comm.broadcast(x),
    }
    row: dict[str, Any] = {"bytes": size}
    for name, call in calls.items():
        x.fill_(1.0 / group.size)
        row[name] = _median_us(group, call, device, iterations)
        if device.type == "cuda":
            row[f"{name} graph"] = _graph_us(group, call, iterations)
    for name, fast in ways.items():
        row |= _own_sums(group, name, fast, device, size, iterations)
    return row


def _own_sums(
    group: TPGroup,
    name: str,
    fast: TPGroup | None,
    device: torch.device,
    size: int,
    iterations: int,
) -> dict[str, float | None]:
    """Of rows of _HIDDEN elements, in a graph: the sum alone, and with residual add and norm."""
    import torch

    x = torch.ones(max(1, size // (2 * _HIDDEN)), _HIDDEN, dtype=torch.bfloat16, device=device)
    names = (f"{name} graph", f"{name} + add + norm graph")
    residual, weight = x.clone(), x[0].clone()
    if fast is None or fast.comm.all_reduce_norm(x, residual, weight, 1e-6) is None:
        return dict.fromkeys(names)
    comm = fast.comm
    calls: tuple[Callable[[], object], ...] = (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce_norm(x, residual, weight, 1e-6),
    )
    times = [_graph_us(group, call, iterations) for call in calls]
    return dict(zip(names, times, strict=True))


def _median_us(
    group: TPGroup, call: Callable[[], object], device: torch.device, iterations: int
) -> float:
    import torch

    times = []
    for i in range(iterations + 5):
        group.comm.barrier()
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 5:
            times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def _graph_us(group: TPGroup, call: Callable[[], object], iterations: int) -> float:
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_PER_GRAPH):
            call()
    times = []
    for i in range(iterations + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.comm.barrier()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1000 * start.elapsed_time(end) / _PER_GRAPH)
    graph.reset()
    return statistics.median(times)


if __name__ == "__main__":
    main()
