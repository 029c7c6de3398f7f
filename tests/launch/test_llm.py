"""`LLM`: a server that lives and dies with the program that made it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys

import pytest

from tests.launch.processes import program
from tests.tiny_models import make_tiny
from tp_runtime import LLM, SamplingParams
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import (
    ConfigError,
    InvalidRequestError,
    ServerUnavailableError,
    WorkerFailedError,
)
from tp_runtime.launch.descendants import descendants
from tp_runtime.launch.preflight import preflight
from tp_runtime.run_folder import list_servers, run_root

SMALL = {"device": "cpu", "max_model_len": 256, "num_kv_blocks": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

SCRIPT = """
import sys, threading, time
from tp_runtime import LLM, SamplingParams

found = []
def work():
    llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", max_model_len=256,
              num_kv_blocks=64)
    found.append(llm)
    print(len(llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids))

thread = threading.Thread(target=work)
thread.start()
thread.join()
print("generated", flush=True)
if sys.argv[2] == "stay":
    time.sleep(1000)
if sys.argv[2] == "raise":
    raise RuntimeError("planted")
"""
"""No `__main__` guard, and the thread that made the server has ended."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared(tiny):
    """The only reference to the LLM of most tests; the last test takes it away."""
    holder = [LLM(tiny, **SMALL)]
    yield holder
    for llm in holder:
        llm.close()


@pytest.fixture
def llm(shared):
    return shared[0]


@pytest.fixture
def script(tmp_path, tiny):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return lambda mode: program(tmp_path / "out", sys.executable, str(path), str(tiny), mode)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["The quick", [5, 6, 7], "Where does the time go", "brown"]
    lengths = [3, 9, 1, 6]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in lengths]
    outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    alone = llm.generate(prompts[1], params[1])
    assert len(alone) == 1
    assert alone[0].token_ids == outputs[1].token_ids


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hello"}]
    [output] = llm.chat(messages, GREEDY)
    expected = llm.client.tokenize(messages=messages)
    assert output.prompt_token_ids == expected


def test_the_progress_bar_counts_prompts_and_tokens_per_second(llm, capsys):
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "prefill" in shown
    assert "decode" in shown
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""  # not a terminal


def test_a_request_that_cannot_work_is_an_error_and_the_next_one_works(llm):
    for wrong in ("", [], [10**6], [-1], [1] * 300):
        with pytest.raises(InvalidRequestError):
            llm.generate([wrong], GREEDY)
    with pytest.raises(InvalidRequestError, match="temperatur"):
        llm.generate("a", temperatur=1.0)
    assert len(llm.generate("a", GREEDY)[0].token_ids) == 8


def test_its_server_is_not_found_by_other_programs(llm):
    assert llm.client.address not in [server.address for server in list_servers()]


def test_settings_that_cannot_work_are_config_errors_and_leave_nothing(tiny, capfd):
    folders = set(run_root().iterdir())
    for model, options, word in (
        ("/no/such/folder", {}, "/no/such/folder"),
        (tiny, {"tensor_parallel_size": 5, "device": "cpu"}, "query heads"),
        (tiny, {"max_model_length": 5}, "max_model_length"),
        (tiny, {"dtype": "float8"}, "float8"),
        (tiny, {"run_ahead": 0}, "--run-ahead"),
    ):
        with pytest.raises(ConfigError, match=word):
            LLM(model, **options)
    assert set(run_root().iterdir()) == folders
    assert capfd.readouterr().err == ""  # the exception says it


def test_under_torchrun_it_names_session(tiny, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"launch\.session"):
        LLM(tiny)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compile_gives_the_same_tokens(tiny):
    def tokens(**settings):
        with LLM(tiny, tensor_parallel_size=2, **SMALL, **settings) as llm:
            prompts = [[1, 2, 3], [4, 5]]
            greedy = llm.generate(prompt_token_ids=prompts, temperature=0, max_tokens=12)
            drawn = llm.generate(prompt_token_ids=prompts, temperature=0.8, seed=3, max_tokens=12)
            return [output.token_ids for output in greedy + drawn]

    assert tokens(compile=True) == tokens()


def test_compile_without_a_compiler_is_refused_before_anything_starts(tiny, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        preflight(EngineConfig(model=tiny, device="cpu", compile=True))


@pytest.mark.slow
def test_an_exception_that_ends_the_program_ends_the_server(script):
    with script("raise") as running:
        assert running.wait() == 1
        assert running.lines()[:2] == ["5", "generated"]
        assert "RuntimeError: planted" in running.text()
        running.assert_all_gone(0.5)


def test_kill_minus_nine_of_the_program_leaves_nothing_after_two_seconds(script):
    with script("stay") as running:
        running.wait_for("generated")
        running.signal(signal.SIGKILL)
        running.assert_all_gone(2.0)


def test_after_a_crash_the_cause_is_raised_and_closing_still_works(tiny):
    llm = LLM(tiny, max_worker_restarts=0, **SMALL)
    processes = descendants(llm._server._process.pid)
    worker = max(processes, key=lambda process: process.start_time)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises((WorkerFailedError, ServerUnavailableError), match="SIGKILL"):
        llm.generate("a", SamplingParams(max_tokens=200, ignore_eos=True))
    llm.close()
    llm.close()
    assert not any(process.alive() for process in processes)
    assert not llm._server.folder.path.exists()


def test_deleting_the_object_ends_its_server(tiny, shared):
    gc.collect()  # tracebacks of the tests before hold it in cycles
    llm = shared.pop()
    processes = descendants(llm._server._process.pid)
    assert len(processes) >= 3
    del llm
    assert not any(process.alive() for process in processes)
