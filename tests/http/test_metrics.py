"""The coordinator's flat samples as Prometheus families."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tp_runtime.http.metrics import PREFIX, HttpMetrics
from tp_runtime.messages import Info


def info(stats: dict[str, float]) -> Info:
    return Info("", "m", "Fake", 4096, 400, 1, "float32", "cpu", True, 64, 16, "ready", stats)


def parsed(page: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), sample
            found[sample.name][labels] = sample.value
    return found


def test_samples_become_counters_gauges_and_histograms_of_the_model():
    stats = {
        "num_requests_running": 3.0,
        'request_success_total{finished_reason="stop"}': 2.0,
        'time_to_first_token_seconds_bucket{le="0.1"}': 1.0,
        'time_to_first_token_seconds_bucket{le="+Inf"}': 4.0,
        "time_to_first_token_seconds_sum": 2.5,
        "time_to_first_token_seconds_count": 4.0,
        "prompt_tokens": 9.0,
        "prompt_tokens_total": 9.0,
    }
    page = HttpMetrics().exposition(info(stats))
    kinds = {family.name: family.type for family in text_string_to_metric_families(page.decode())}
    assert kinds[PREFIX + "time_to_first_token_seconds"] == "histogram"
    assert kinds[PREFIX + "request_success"] == "counter"
    assert kinds[PREFIX + "num_requests_running"] == "gauge"
    values = parsed(page)
    model = ("model_name", "m")
    assert values[PREFIX + "num_requests_running"] == {(model,): 3.0}
    stop = (("finished_reason", "stop"), model)
    assert values[PREFIX + "request_success_total"] == {stop: 2.0}
    bucket = values[PREFIX + "time_to_first_token_seconds_bucket"]
    assert bucket == {(("le", "0.1"), model): 1.0, (("le", "+Inf"), model): 4.0}
    assert PREFIX + "prompt_tokens" not in values  # one value, one name


def test_the_state_is_told_and_an_engine_that_is_gone_leaves_the_rest():
    values = parsed(HttpMetrics().exposition(info({})))
    states = {
        dict(labels)["state"]: value for labels, value in values[PREFIX + "server_state"].items()
    }
    assert states == {"starting": 0.0, "ready": 1.0, "recovering": 0.0, "draining": 0.0}
    metrics = HttpMetrics()
    metrics.answered("/v1/models", "GET", 200, 0.01)
    counted = parsed(metrics.exposition(None))["http_requests_total"]
    assert list(counted.values()) == [1.0]
