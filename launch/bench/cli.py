"""The command group `tp-runtime bench`; each benchmark is imported when it is run."""

from __future__ import annotations

from tp_runtime.launch.lazy_group import LazyCommand, lazy_group

bench_command = lazy_group(
    "bench",
    "Measure: a table for people, one JSON line last.",
    {
        "throughput": LazyCommand(
            "tp_runtime.launch.bench.throughput",
            "throughput_command",
            "Many prompts at once, as fast as they go.",
        ),
        "latency": LazyCommand(
            "tp_runtime.launch.bench.latency", "latency_command", "Time of a step at fixed batch."
        ),
        "serve": LazyCommand(
            "tp_runtime.launch.bench.serve", "serve_command", "Clients that come and wait."
        ),
        "comm": LazyCommand(
            "tp_runtime.launch.bench.comm", "comm_command", "Collectives between the ranks."
        ),
        "broadcast": LazyCommand(
            "tp_runtime.launch.bench.broadcast",
            "broadcast_command",
            "From the publication of a plan to every rank.",
        ),
        "kernels": LazyCommand(
            "tp_runtime.launch.bench.kernels",
            "kernels_command",
            "The operators of a decode step, one by one.",
        ),
        "coordinator": LazyCommand(
            "tp_runtime.launch.bench.coordinator",
            "coordinator_command",
            "The coordinator alone, workers answering at once.",
        ),
    },
)
