"""`--check` end to end: a rank that computes something else is named, with the row."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.launch import divergent_worker as planted
from tests.tiny_models import make_tiny
from tp_runtime import LLM
from tp_runtime.errors import WorkerFailedError

SETTINGS = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")


def generate(llm: LLM) -> list[list[int]]:
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    outputs = llm.generate(prompt_token_ids=prompts, temperature=0, max_tokens=12, ignore_eos=True)
    return [output.token_ids for output in outputs]


def test_a_divergence_ends_the_step_with_rank_and_row(tiny, tmp_path, monkeypatch):
    Path(tmp_path / "sitecustomize.py").write_text("import tests.launch.divergent_worker\n")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    with (
        LLM(tiny, tensor_parallel_size=2, check=True, max_worker_restarts=0, **SETTINGS) as llm,
        pytest.raises(WorkerFailedError) as caught,
    ):
        generate(llm)
    message = str(caught.value)
    assert re.search(r"after step \d+", message)
    assert f"rank {planted.BAD_RANK} from the majority, first in row {planted.BAD_ROW}" in message


def test_checking_every_step_changes_no_token(tiny):
    found = []
    for ranks, check in ((1, False), (2, True)):
        with LLM(tiny, tensor_parallel_size=ranks, check=check, **SETTINGS) as llm:
            found.append(generate(llm))
    assert found[0] == found[1]
