"""Every metric that the Grafana board draws is one that a server exports."""

from __future__ import annotations

import json
import re

from tests.import_scan import ROOT
from tp_runtime.coordinator.metrics import Metrics
from tp_runtime.http.metrics import PREFIX, HttpMetrics


def test_the_board_draws_only_metrics_that_exist():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    drawn = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(rf"{PREFIX}(\w+)", target["expr"])
    }
    assert len(drawn) > 15
    histograms = {f"{histogram.name}_bucket" for histogram in Metrics().histograms}
    state = (ROOT / "tp_runtime/coordinator/server_state.py").read_text(encoding="utf-8")
    metrics = (ROOT / "tp_runtime/coordinator/metrics.py").read_text(encoding="utf-8")
    flat = set(re.findall(r"""["'](\w+)["'{]""", state + metrics))
    assert drawn - histograms - flat - {"server_state"} == set()
    assert b"http_requests" in HttpMetrics().exposition(None)  # the one without our prefix
