"""`tp-runtime generate` and `demo`, typed as a person types them."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.launch.processes import SMALL, TP_RUNTIME, program
from tests.tiny_models import make_tiny
from tp_runtime.launch import exit_status


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def generate(tiny, tmp_path):
    command = (*TP_RUNTIME, "generate", tiny, *SMALL)
    return lambda *arguments: program(tmp_path / "out", *command, *arguments)


def test_one_json_object_per_prompt_and_line(generate):
    arguments = ("-tp", "2", "--prompt", "Hello", "--prompt-ids", "5,6,7", "--max-tokens", "6")
    with generate(*arguments, "--temperature", "0", "--ignore-eos", "--json") as running:
        assert running.wait() == exit_status.OK, running.text()
        records = [json.loads(line) for line in running.lines()]
        assert len(records) == 2
        for record in records:
            assert set(record) == {"text", "token_ids", "finish_reason"}
            assert len(record["token_ids"]) == 6
            assert record["finish_reason"] == "length"
        running.assert_all_gone(0.5)


def test_a_prompt_that_cannot_run_is_one_sentence_and_a_failure(generate):
    with generate("--prompt-ids", ",".join(["5"] * 300)) as running:
        assert running.wait() == exit_status.FAILED
        [sentence] = [s for s in running.text().splitlines() if not s.endswith("...")]
        assert "256" in sentence
        running.assert_all_gone(0.5)


def test_no_prompt_and_bad_ids_are_refused_before_anything_starts(generate):
    for arguments in ((), ("--prompt-ids", "1,x"), ("--prompt", "a", "--temperature", "-1")):
        with generate(*arguments) as running:
            started = time.monotonic()
            assert running.wait() != exit_status.OK
            assert time.monotonic() - started < 2
            assert len(running.seen) == 1
            assert len(running.text().splitlines()) == 1


def test_ctrl_c_during_generation_leaves_nothing_after_two_seconds(generate):
    arguments = ("--prompt", "Hello", "--max-tokens", "250", "--ignore-eos", "-tp", "2")
    with generate(*arguments) as running:
        running.wait_ready()
        running.signal(signal.SIGINT)
        running.assert_all_gone(2.0)
        assert running.process.returncode == exit_status.of_signal(signal.SIGINT)
        assert "Traceback" not in running.text()


def test_the_demo_takes_any_folder_and_compares_one_worker_with_two(tiny, tmp_path):
    command = (*TP_RUNTIME, "demo", "--model", tiny, "--device", "cpu", "--max-tokens", "12")
    with program(tmp_path / "out", *command) as running:
        assert running.wait(90) == exit_status.OK, running.text()
        assert "1 worker gives the same" in running.text()
        assert "tokens/s" in running.text()
        running.assert_all_gone(0.5)
