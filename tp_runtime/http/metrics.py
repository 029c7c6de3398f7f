"""`GET /metrics`: what the coordinator measures and what this server does, for Prometheus.

The coordinator's samples come flat (`name_bucket{le="0.1"}`) under vLLM's names without their
prefix; they leave as `tp_runtime:` + name, with the model's name as a label as in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tp_runtime.messages import Info

PREFIX = "tp_runtime:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "ready", "recovering", "draining")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PARTS = ("_bucket", "_sum", "_count")
_HTTP_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


class HttpMetrics:
    """What this process counts itself. `info` of `exposition` is the coordinator's, None while it
    does not answer."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests",
            "HTTP requests by path and status.",
            ["handler", "method", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's first line to the last byte of the answer.",
            ["handler"],
            buckets=_HTTP_BOUNDS,
            registry=self._registry,
        )

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(handler, method, str(status)).inc()
        self._seconds.labels(handler).observe(seconds)

    def exposition(self, info: Info | None) -> bytes:
        """The page in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        if info is None:
            return text + b"# the coordinator does not answer; its metrics are left out\n"
        registry = CollectorRegistry()
        registry.register(_EngineCollector(info))
        return generate_latest(registry) + text


class _EngineCollector(Collector):
    def __init__(self, info: Info) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        info = self._info
        labels = {"model_name": info.model}
        state = Metric(PREFIX + "server_state", "1 for the state the server is in.", "gauge")
        for name in STATES:
            state.add_sample(state.name, {**labels, "state": name}, float(name == info.state))
        yield state
        config = Metric(PREFIX + "cache_config_info", "Settings of the KV cache.", "gauge")
        facts = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_kv_blocks)}
        config.add_sample(config.name, {**labels, **facts}, 1.0)
        yield config
        yield from families(info.stats, labels)


def families(stats: Mapping[str, float], labels: Mapping[str, str]) -> list[Metric]:
    """Flat samples as metric families; `labels` are added to each."""
    histograms = {name.partition("_bucket{")[0] for name in stats if "_bucket{" in name}
    found: dict[str, Metric] = {}
    for key, value in stats.items():
        match = _SAMPLE.fullmatch(key)
        if match is None or key + "_total" in stats:
            continue  # the same value under an older name
        name, given = match.group(1), dict(_LABEL.findall(match.group(2) or ""))
        family, kind = _family(name, histograms)
        metric = found.get(family)
        if metric is None:
            metric = found[family] = Metric(PREFIX + family, _HELP.get(family, family), kind)
        metric.add_sample(PREFIX + name, {**labels, **given}, value)
    return list(found.values())


def _family(name: str, histograms: set[str]) -> tuple[str, str]:
    for part in _PARTS:
        base = name.removesuffix(part)
        if base != name and base in histograms:
            return base, "histogram"
    if name.endswith("_total"):
        return name.removesuffix("_total"), "counter"
    return name, "gauge"


_HELP = {
    "num_requests_running": "Samples in the running batch.",
    "num_requests_waiting": "Samples that wait for a place in the batch.",
    "kv_cache_usage_perc": "Used part of the KV cache, 0 to 1.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Samples that were put back into the queue for want of KV blocks.",
    "graphs_left": "CUDA graphs that are still to be recorded, while nothing runs or one a second.",
    "recoveries": "Times that all workers were replaced.",
    "recovery_seconds": "From the workers' last sign of life to the next token, by part.",
    "request_success": "Samples that ended, by reason.",
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of one sample.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first computation.",
}
