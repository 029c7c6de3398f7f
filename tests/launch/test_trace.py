"""`--trace FILE`: one timeline of the coordinator and of every rank, with matching steps."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from tests.tiny_models import make_tiny
from tp_runtime import LLM
from tp_runtime.errors import ConfigError

SMALL = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64}
TOKENS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")


def test_a_trace_has_every_step_of_the_coordinator_and_of_all_ranks(tiny, tmp_path):
    file = tmp_path / "trace.json"
    with LLM(tiny, tensor_parallel_size=2, trace=str(file), **SMALL) as llm:
        llm.generate(prompt_token_ids=[[1, 2, 3]], max_tokens=TOKENS, ignore_eos=True)
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["coordinator", "rank 0", "rank 1"]
    steps: dict[tuple[str, str], dict[int, tuple[float, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = event["ts"], event["ts"] + event["dur"]
            steps[names[event["pid"]], event["name"]][event["args"]["step"]] = span
    wanted = {("coordinator", n) for n in ("plan", "publish", "wait", "commit")}
    wanted |= {("rank 0", n) for n in ("apply", "run", "answer")}
    wanted |= {("rank 1", n) for n in ("apply", "run")}
    assert steps.pop(("coordinator", "hand_over"))  # once for all answers that were there
    assert set(steps) == wanted
    assert all(set(found) == set(range(1, TOKENS + 1)) for found in steps.values())
    for step in range(1, TOKENS + 1):  # one clock: a step runs after it is planned, then ends
        planned = steps["coordinator", "plan"][step][1]
        answered = steps["coordinator", "commit"][step][0]
        for rank in ("rank 0", "rank 1"):
            assert planned <= steps[rank, "apply"][step][0]
        assert steps["rank 0", "run"][step][1] <= answered


def test_a_trace_that_cannot_be_written_is_refused_before_the_model_loads(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--trace"):
        LLM(tiny, trace=str(tmp_path / "missing" / "trace.json"), **SMALL)
