"""Programs that others wrote, as their users run them, against a real server of two CPU workers.

lm-evaluation-harness scores a small task through the API and through transformers; GuideLLM puts a
short load on the server. Both are large, so `make third-party` installs them (the extra
`third-party` of setup.cfg) and runs this file; elsewhere its tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.processes import TP_RUNTIME, program
from tests.tiny_models import write_json

SERVED = "demo"
QUESTIONS = [
    ("The capital of France is", [" Paris", " London", " a cheese"], 0),
    ("Water freezes at a temperature of", [" zero degrees", " a hundred degrees"], 0),
    ("The opposite of hot is", [" blue", " cold"], 1),
    ("Two and two is", [" four", " seven", " fish"], 0),
]
TASK = """
task: small_facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("lm_eval", "guidellm")),
        reason="lm_eval and guidellm are not installed; `make third-party` installs them",
    ),
]


@pytest.fixture(scope="module")
def url(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512")
    flags += ("--num-kv-blocks", "512", "--served-model-name", SERVED, "--http", "--port", "0")
    command = (*TP_RUNTIME, "serve", str(demo_model), "-tp", "2", *flags)
    with program(tmp_path_factory.mktemp("server") / "out", *command) as running:
        running.wait_ready(180)
        yield running.folders()[0].read_http()


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make third-party` installs it")


def likelihoods(kind: str, arguments: str, tasks: Path) -> list[list[float]]:
    """Log-likelihood of every choice of every question, as lm-eval computes them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["small_facts"],
        task_manager=manager,
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["small_facts"], key=lambda sample: sample["doc_id"])
    return [[float(resp[0][0]) for resp in sample["resps"]] for sample in samples]


def test_lm_eval_gets_the_log_likelihoods_of_transformers(
    url: str, demo_model: Path, tmp_path: Path
) -> None:
    needs("lm_eval")
    data = tmp_path / "questions.jsonl"
    data.write_text(
        "\n".join(
            json.dumps({"question": question, "choices": choices, "answer": answer})
            for question, choices, answer in QUESTIONS
        )
    )
    (tmp_path / "small_facts.yaml").write_text(TASK.format(data=json.dumps(str(data))))
    through_api = likelihoods(
        "local-completions",
        f"model={SERVED},base_url={url}/v1/completions,tokenizer={demo_model},num_concurrent=4",
        tmp_path,
    )
    wanted = likelihoods("hf", f"pretrained={demo_model},dtype=float32,device=cpu", tmp_path)
    assert [len(choices) for choices in wanted] == [len(q[1]) for q in QUESTIONS]
    for ours, theirs in zip(through_api, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_guidellm_puts_a_load_on_the_server_without_an_error(
    url: str, demo_model: Path, tmp_path: Path
) -> None:
    needs("guidellm")
    scenario = {
        "spec": {
            "backend": {"kind": "openai_http", "target": url, "model": SERVED},
            "profile": {"kind": "concurrent", "streams": [4]},
            "constraints": [{"kind": "max_requests", "count": 12}],
            "data": [{"kind": "synthetic_text", "prompt_tokens": 24, "output_tokens": 8}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(demo_model)},
            "outputs": [{"kind": "json", "path": str(tmp_path / "report.json")}],
        }
    }
    write_json(tmp_path / "load.json", scenario)
    run = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", "--config", str(tmp_path / "load.json")],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
