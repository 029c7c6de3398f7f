"""`tp-runtime bench`: each benchmark runs at a tiny size and says what it promises to say.

No figure is judged here; a benchmark is a program, not a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import RequestFailedError
from tp_runtime.launch import cli
from tp_runtime.launch.bench import latency, serve, throughput
from tp_runtime.launch.bench.null_server import NullServer
from tp_runtime.launch.bench.reference_check import compare
from tp_runtime.launch.bench.report import percentile
from tp_runtime.launch.bench.shapes import SHAPES, shape_folder
from tp_runtime.launch.bench.workload import GENERATED_TOKENS, Workload, make_workload
from tp_runtime.messages import Logprob, TokenLogprobs
from tp_runtime.model_config import ModelConfig
from tp_runtime.outputs import CompletionOutput, RequestOutput

TINY = ("--shape", "tiny", "--device", "cpu", "--num-kv-blocks", "512")


def bench(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, Any]]:
    """Everything printed, and the JSON of the last line."""
    status, (output, errors) = cli.run(["bench", *arguments]), capfd.readouterr()
    assert status == 0, errors
    record = json.loads(output.splitlines()[-1])
    assert {"benchmark", "revision", "hardware", "dtype", "tensor_parallel_size"} <= set(record)
    return output, record


def test_the_workload_is_nano_vllms_to_the_token():
    work = make_workload()
    assert (len(work.prompts), work.generated_tokens) == (256, GENERATED_TOKENS)
    assert work.prompt_tokens == 142_827
    assert all(params.ignore_eos and params.temperature == 0.6 for params in work.params())


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
    ],
)
def test_shapes_have_the_parameters_of_the_models_they_are_named_after(shape, billions):
    with shape_folder(shape) as folder:
        config = ModelConfig.from_folder(folder)
    assert config.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert set(SHAPES) >= {shape, "tiny"}


def output(*tokens: tuple[int, float], top: tuple[tuple[int, float], ...] = ()) -> RequestOutput:
    logprobs = [
        TokenLogprobs(Logprob(t, p, 1), [Logprob(i, q, 1) for i, q in ((t, p), *top)])
        for t, p in tokens
    ]
    return RequestOutput("r", outputs=[CompletionOutput(0, logprobs=logprobs)])


def test_a_near_tie_ends_the_comparison_of_a_sequence_and_is_no_fault():
    reference = output((1, -1.0), (2, -1.0), (3, -1.0), top=((9, -1.0005),))
    mine = output((1, -1.0), (9, -1.0005), (8, -4.0))
    assert compare([mine], [reference], 1e-3)[:2] == (2, 1)


@pytest.mark.parametrize(
    "mine",
    [output((1, -1.0), (9, -1.5)), output((1, -1.0), (7, -1.0)), output((1, -1.0), (2, -1.2))],
    ids=["clearly less likely", "not among the likely", "another log-probability"],
)
def test_another_token_or_log_probability_is_refused(mine):
    reference = output((1, -1.0), (2, -1.0), top=((9, -1.5),))
    with pytest.raises(RequestFailedError, match="Prompt 0, token 1"):
        compare([mine], [reference], 1e-2)


def test_no_figures_are_printed_when_the_check_fails(monkeypatch, capfd):
    def differs(*_: object, **__: object) -> None:
        raise RequestFailedError("Prompt 0, token 3 differs.")

    monkeypatch.setattr(throughput, "check_against_reference", differs)
    assert cli.run(["bench", "throughput", *TINY, "--check", "2"]) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "token 3 differs" in printed.err


def test_percentiles_are_of_the_values_given():
    assert [percentile(list(range(100)), p) for p in (50, 95, 99)] == [50, 95, 99]
    assert percentile([], 99) == 0.0


def test_throughput_counts_its_tokens_and_prints_both_runs(monkeypatch, capfd):
    monkeypatch.setattr(throughput, "make_workload", lambda: Workload([[1, 2, 3], [4]], [6, 5]))
    text, record = bench(capfd, "throughput", *TINY)
    assert record["results"]["tokens"] == 11
    assert len(record["results"]["generated_tok_s"]) == 2
    assert [line.split()[0] for line in text.splitlines()[-4:-1]] == ["run", "1", "2"]
    assert record["weights"] == "random"


def test_latency_has_a_row_per_batch(capfd):
    lengths = ("--input-len", "8", "--output-len", "4", "--repeats", "1")
    _, record = bench(capfd, "latency", *TINY, "--batch", "1,2", *lengths)
    assert [row["batch"] for row in record["results"]] == [1, 2]
    assert all(row["ms_token"] > 0 and row["gb_step"] > 0 for row in record["results"])
    assert record["copy_rate_gb_s"] is None  # measured on GPUs only


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("serve", "--num-requests", "0"),
        ("serve", "--clients", "0"),
        ("serve", "--output-len", "0"),
        ("serve", "--rate", "-1"),
        ("latency", "--output-len", "0"),
        ("latency", "--repeats", "0"),
        ("latency", "--batch", "0,1"),
        ("latency", "--batch", "one"),
    ],
)
def test_what_makes_no_measurement_is_refused(capfd, command, flag, value):
    assert cli.run(["bench", command, *TINY, flag, value]) == 2
    printed = capfd.readouterr()
    assert value in printed.err
    assert "Traceback" not in printed.err


def test_a_late_step_is_that_after_the_middle_token():
    early = [(0.0, 0), (5.0, 1), (5.1, 2)]
    assert latency._late_step([*early, (6.1, 4), (7.1, 6), (9.1, 8)]) == pytest.approx(3.0 / 4)
    assert latency._late_step([(0.0, 0), (8.0, 4)]) == pytest.approx(2.0)
    assert latency._late_step([(0.0, 0), (8.0, 1)]) == pytest.approx(8.0)


def test_serve_measures_arrivals_beside_rows_that_decode(capfd):
    lengths = ("--input-len", "8", "--output-len", "5", "--num-requests", "6")
    null = ("--null-workers", "--null-step-ms", "1", "--background", "3", "--device", "cpu")
    for load in (("--rate", "50"), ("--clients", "2")):
        text, record = bench(capfd, "serve", *null, *lengths, *load)
        assert record["results"]["requests"] == 6
        assert set(record["results"]["ttft_ms"]) == {"p50", "p95", "p99"}
        waits = text.partition("Wait in the queue\n")[2].splitlines()[:-1]
        assert sum(int(line.partition("ms")[2].split()[0]) for line in waits) == 6


def test_clients_that_are_staggered_send_one_request_more_that_does_not_count(capfd, monkeypatch):
    lengths = []
    request = serve._request

    async def noting(client, load, number):
        lengths.append((number, load.output_len))
        return await request(client, load, number)

    monkeypatch.setattr(serve, "_request", noting)
    null = ("--null-workers", "--null-step-ms", "1", "--device", "cpu")
    load = ("--clients", "4", "--stagger", "--num-requests", "8")
    _, record = bench(capfd, "serve", *null, "--input-len", "8", "--output-len", "20", *load)
    assert record["results"]["requests"] == 8
    assert sorted(length for _, length in lengths[:4]) == [5, 10, 15, 20]
    counted = [entry for entry in lengths if entry[0] >= 0]
    assert sorted(counted) == [(number, 20) for number in range(8)]
    assert len(lengths) > 12  # others go on until the last of them ends
    assert cli.run(["bench", "serve", *null, *load, "--rate", "5"]) == 2
    assert "leave --rate out" in capfd.readouterr().err


def test_serve_says_when_its_background_cannot_run_at_once(capfd, monkeypatch):
    monkeypatch.setattr(serve, "_START_S", 1.0)
    flags = ("--null-workers", "--device", "cpu", "--background", "3", "--num-requests", "1")
    assert cli.run(["bench", "serve", *flags, "--max-num-seqs", "3"]) == 2
    assert "no room beside it in a batch of --max-num-seqs 3" in capfd.readouterr().err
    with shape_folder("tiny") as folder:
        config = EngineConfig(
            model=str(folder), device="cpu", load_format="dummy", max_num_seqs=2, num_kv_blocks=8192
        )
        with NullServer(config, 1000) as elsewhere:
            flags = ("--address", elsewhere.address, "--background", "3", "--num-requests", "1")
            assert cli.run(["bench", "serve", *flags]) == 2
    assert "do not all run at the same time" in capfd.readouterr().err


def test_coordinator_reports_every_case_memory_and_profile(capfd):
    small = ("--rows", "3", "--context", "40", "--steps", "30", "--memory-steps", "50")
    text, record = bench(capfd, "coordinator", *small)
    cases = record["results"]["cases"]
    assert [(case["rows"], case["window"]) for case in cases] == [(3, 2), (3, 8)]
    assert all(case["period_ms"] > 0 and 0 < case["plan_bytes"] < 1024 for case in cases)
    assert set(cases[0]["cpu"]) >= {"engine", "output", "frontend"}
    assert "rss_growth_mb" in record["results"]
    assert "scheduler.py" in text


def test_comm_times_every_collective_at_every_size(capfd):
    few = ("--sizes", "1024,4096", "--iterations", "2", "--device", "cpu")
    _, record = bench(capfd, "comm", "-tp", "2", *few)
    assert [row["bytes"] for row in record["results"]] == [1024, 4096]
    assert all(row["all_reduce"] > 0 and row["gather"] > 0 for row in record["results"])


def test_broadcast_times_sleeping_and_waiting_readers(capfd):
    _, record = bench(capfd, "broadcast", "-tp", "2", "--messages", "20")
    assert [row["readers"] for row in record["results"]] == ["busy", "idle"]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in record["results"])
    assert cli.run(["bench", "broadcast", "--size", "4"]) == 2
    assert "--size 4" in capfd.readouterr().err


def test_kernels_times_every_operator_of_a_decode_step_beside_plain_pytorch(capfd):
    flags = ("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "-tp", "2")
    output, record = bench(capfd, "kernels", *flags, "--rows", "1,3", "--context", "40")
    assert record["context"] == 40 and record["copy_rate_gb_s"] is None
    names = {row["kernel"] for row in record["results"]}
    assert {"add, norm", "norm, qkv", "down", "LM head", "attention, reference"} <= names
    assert len(record["results"]) == 2 * len(names)
    for row in record["results"]:
        assert row["us"] > 0 and row["gb_s"] > 0
        assert row["kernel"] in output
    compared = [row for row in record["results"] if row["plain_us"] is not None]
    assert len(compared) >= 2 * 9
