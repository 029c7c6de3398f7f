"""`tp-runtime doctor`: every fault it knows, planted into the facts; and the program itself."""

from __future__ import annotations

import msgspec
import pytest

from tests.launch.processes import TP_RUNTIME, program
from tests.tiny_models import make_tiny, tiny_config
from tp_runtime.launch import cli, doctor, exit_status
from tp_runtime.launch.doctor import examine_model
from tp_runtime.launch.doctor_checks import Finding, check_machine, is_broken
from tp_runtime.launch.doctor_examination import all_reduce, read_answer, worst_of
from tp_runtime.launch.doctor_facts import (
    PACKAGES,
    Backend,
    Copy,
    Gpu,
    Limits,
    MachineFacts,
    Reduce,
    TorchFacts,
)
from tp_runtime.launch.doctor_model import check_fit, describe, memory_table, number_format
from tp_runtime.model_config import ModelConfig

GIB, MIB = 1 << 30, 1 << 20
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 138 * GIB)
TORCH = TorchFacts(
    cuda="13.0",
    nccl="2.28.9",
    gpus=[H200, H200],
    backends=[Backend("flash-attn-3", ""), Backend("triton", "")],
    chosen="flash-attn-3",
    dtype="bfloat16",
)
LIMITS = Limits(
    nofile=65536,
    nproc=-1,
    memlock=-1,
    shm_total=16 * GIB,
    shm_free=16 * GIB,
    cores=32,
    memory=256 * GIB,
    memory_free=200 * GIB,
)
HEALTHY = MachineFacts(
    python="3.11.9",
    system="Linux 6.8, x86_64",
    packages=dict.fromkeys(PACKAGES, "1.0"),
    driver="580.1",
    present=2,
    visible=2,
    torch=TORCH,
    copies=[Copy(0, 1, True, True, 350.0), Copy(1, 0, True, True, 340.0)],
    reduce=Reduce("nccl", 2, "", 200.0),
    limits=LIMITS,
)
NO_GPU = msgspec.structs.replace(
    HEALTHY,
    driver="",
    present=0,
    visible=0,
    copies=[],
    torch=TorchFacts(backends=[Backend("reference", "")], chosen="reference", dtype="float32"),
    reduce=Reduce("gloo", 2, "", 1.0),
)
replace = msgspec.structs.replace


def findings(facts: MachineFacts, level: str) -> list[Finding]:
    return [
        each for group in check_machine(facts).values() for each in group if each.level == level
    ]


@pytest.mark.parametrize("facts", [HEALTHY, NO_GPU])
def test_a_sound_machine_has_nothing_wrong(facts):
    assert not is_broken(check_machine(facts))
    assert len(findings(facts, "note")) == (0 if facts is HEALTHY else 1)


BROKEN = {
    "an old Python": ({"python": "3.9.2"}, "3.9.2", "3.11"),
    "no torch": ({"packages": {**HEALTHY.packages, "torch": ""}}, "torch", "pip install torch"),
    "no triton beside GPUs": ({"packages": {**HEALTHY.packages, "triton": ""}}, "triton", "pip"),
    "torch does not load": ({"torch_error": "libcudart.so.13: no such file"}, "libcudart", "torch"),
    "a driver that does not answer": ({"gpu_error": "check nvidia-smi"}, "nvidia-smi", ""),
    "torch without CUDA": (
        {"torch": replace(TORCH, gpus=[], cuda_error="this torch is a build without CUDA")},
        "without CUDA",
        "Install torch with CUDA",
    ),
    "copies that change the data": (
        {"copies": [Copy(0, 1, True, True, 9.0), Copy(1, 0, True, False, 9.0)]},
        "GPU 1 to 0 arrived changed",
        "ACS",
    ),
    "copies that hang": ({"copy_error": "it gave no answer within 60 s"}, "60 s", "P2P_DISABLE"),
    "an all-reduce that fails": (
        {"reduce": Reduce("nccl", 2, "rank 1: ncclSystemError")},
        "rank 1: ncclSystemError",
        "NCCL_DEBUG=INFO",
    ),
    "an all-reduce without shared memory": (
        {
            "reduce": Reduce("nccl", 2, "rank 0: Bus error"),
            "limits": replace(LIMITS, shm_free=20 * MIB, shm_total=64 * MIB),
        },
        "Bus error",
        "--shm-size",
    ),
    "small shared memory that NCCL needs": (
        {
            "copies": [Copy(0, 1, False, True, 9.0), Copy(1, 0, False, True, 9.0)],
            "limits": replace(LIMITS, shm_free=20 * MIB, shm_total=64 * MIB),
        },
        "/dev/shm is small (20 of 64 MiB free)",
        "--shm-size",
    ),
    "no attention at all": (
        {"torch": replace(TORCH, chosen="", backends=[Backend("triton", "it is broken")])},
        "triton: it is broken",
        "",
    ),
    "few descriptors": ({"limits": replace(LIMITS, nofile=256)}, "256 open files", "ulimit -n"),
    "few processes": ({"limits": replace(LIMITS, nproc=100)}, "100 processes", "ulimit -u"),
}


@pytest.mark.parametrize(("changes", "text", "advice"), BROKEN.values(), ids=BROKEN)
def test_a_fault_is_named_with_what_to_do(changes, text, advice):
    facts = replace(HEALTHY, **changes)
    assert is_broken(check_machine(facts))
    assert any(text in each.text and advice in each.advice for each in findings(facts, "wrong"))


NOTED = {
    "hidden GPUs": (
        {"visible": 0, "mask": "", "torch": NO_GPU.torch},
        "CUDA_VISIBLE_DEVICES is ''",
    ),
    "memory that others hold": (
        {"torch": replace(TORCH, gpus=[H200, replace(H200, free=40 * GIB)])},
        "100.0 GiB of GPU 1",
    ),
    "an old GPU": ({"torch": replace(TORCH, gpus=[replace(H200, capability=(7, 5))])}, "Ampere"),
    "GPUs without a direct way": (
        {"copies": [Copy(0, 1, False, True, 9.0), Copy(1, 0, True, True, 9.0)]},
        "1 of 2 pairs",
    ),
    "a slower attention": (
        {
            "torch": replace(
                TORCH,
                backends=[
                    Backend("flash-attn-3", "the module x is not installed"),
                    Backend("triton", ""),
                ],
                chosen="triton",
            )
        },
        "Not flash-attn-3",
    ),
    "little locked memory": ({"limits": replace(LIMITS, memlock=8 * MIB)}, "8 MiB"),
}


@pytest.mark.parametrize(("changes", "text"), NOTED.values(), ids=NOTED)
def test_what_is_only_slow_or_unusual_is_a_note(changes, text):
    facts = replace(HEALTHY, **changes)
    assert not is_broken(check_machine(facts))
    assert any(text in each.text for each in findings(facts, "note"))


def test_a_better_attention_comes_with_how_to_get_it():
    backends = [Backend("flash-attn-3", "the module x is not installed"), Backend("triton", "")]
    facts = replace(HEALTHY, torch=replace(TORCH, backends=backends, chosen="triton"))
    assert any("flash-attention" in each.advice for each in findings(facts, "note"))


def test_an_all_reduce_over_real_processes_adds_up():
    assert all_reduce("gloo", 2).error == ""


def test_the_rank_that_failed_is_the_cause_and_not_those_that_waited():
    right = (Reduce("gloo", 3, "", 5.0), "")
    failed = (None, "its process was killed by SIGSEGV")
    killed = (None, "its process was killed by SIGKILL")
    assert worst_of("gloo", [killed, right, failed], [0]).error.startswith("rank 2: ")
    assert "from rank 0" in worst_of("gloo", [killed, right, right], [0]).error
    wrong = (Reduce("gloo", 3, "7 of 9 sums are wrong on rank 1"), "")
    assert "rank 1" in worst_of("gloo", [right, wrong, right], []).error
    slow = (Reduce("gloo", 3, "", 2.0), "")
    assert worst_of("gloo", [right, slow, right], []) == slow[0]


@pytest.mark.parametrize(
    ("status", "out", "err", "word"),
    [
        (-11, "", "", "SIGSEGV"),
        (1, "", "Traceback\n  ...\nImportError: no libtorch\n", "ImportError: no libtorch"),
        (3, "", "", "status 3"),
        (0, "", "", "cannot be read"),
        (0, "{}", "", "cannot be read"),
    ],
)
def test_a_probe_that_failed_is_one_clause(status, out, err, word):
    found, error = read_answer(Reduce, status, out, err)
    assert found is None
    assert word in error


def test_a_probe_may_print_other_things_first():
    found, error = read_answer(Reduce, 0, 'hello\n{"backend": "gloo", "ranks": 2}\n', "noise")
    assert (found, error) == (Reduce("gloo", 2), "")


def big(**changes: object) -> ModelConfig:
    """The shape of Qwen3-8B."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    return ModelConfig.from_dict(tiny_config("qwen3", **{**sizes, **changes}))


def test_the_table_tells_weights_cache_and_context_per_size():
    one, two, four, eight = memory_table(big(), "bfloat16", [24 * GIB, 80 * GIB])[1:]
    assert one.split()[:3] == ["1", "15.26", "GiB"]
    assert one.split()[3:5] == ["140.6", "MiB"]
    assert two.split()[3:5] == ["70.3", "MiB"]
    assert one.endswith("40,960 (all)")
    assert int(one.split("~")[1].split()[2].replace(",", "")) < 40_960
    assert four.count("(all)") == eight.count("(all)") == 2


def test_a_size_above_the_query_heads_is_said_to_be_impossible():
    lines = memory_table(big(num_attention_heads=4, num_key_value_heads=2), "bfloat16", [GIB])
    assert "not possible: 4 query heads" in lines[-1]
    assert "does not fit" in lines[1]


def test_a_model_too_large_for_the_gpus_is_wrong_and_one_that_fits_names_how_many():
    small = Gpu("small", (8, 9), 12 * GIB, 12 * GIB)
    facts = replace(HEALTHY, torch=replace(TORCH, gpus=[small]))
    [finding] = check_fit(big(), "bfloat16", facts)
    assert finding.level == "wrong"
    facts = replace(HEALTHY, torch=replace(TORCH, gpus=[small, small]))
    [finding] = check_fit(big(), "bfloat16", facts)
    assert "fits on 2 GPUs" in finding.text
    [finding] = check_fit(big(), "bfloat16", HEALTHY)
    assert "fits on 1 GPU " in finding.text
    tight = replace(NO_GPU, limits=replace(LIMITS, memory_free=8 * GIB))
    [finding] = check_fit(big(), "bfloat16", tight)
    assert finding.level == "wrong"


def test_the_number_format_is_the_checkpoints_unless_asked_for():
    assert number_format("auto", big()) == "bfloat16"
    assert number_format("float16", big()) == "float16"
    assert number_format("auto", big(torch_dtype="float64")) == "bfloat16"


def test_the_model_is_described_and_missing_files_are_wrong(tmp_path):
    folder = make_tiny("qwen3", tmp_path / "m", chat_template=False)
    config = ModelConfig.from_folder(folder)
    found, table = examine_model(folder, config, "auto", NO_GPU)
    assert "Qwen3ForCausalLM" in found[0].text
    assert any("base model" in each.text for each in found)
    assert "context on 24 GB" in table[0]
    (folder / "model.safetensors").unlink()
    found, _ = examine_model(folder, config, "auto", NO_GPU)
    assert [each.level for each in found].count("wrong") == 1
    assert "billion" in describe(big())[0].text


def test_the_program_reports_machine_and_model_and_ends_with_a_status(tmp_path):
    """A fault of this very process: too few descriptors."""
    folder = make_tiny("qwen3", tmp_path / "m")
    command = f"ulimit -n 200; exec {' '.join(TP_RUNTIME)} doctor {folder}"
    with program(tmp_path / "out", "sh", "-c", command) as running:
        assert running.wait(100) == exit_status.FAILED, running.text()
        text = running.text()
        for part in ("torch", "gave the right sums", "is chosen", "/dev/shm", "Qwen3ForCausalLM"):
            assert part in text
        assert "WRONG Only 200 open files" in text
        assert "1 thing is wrong" in text
        running.assert_all_gone(0.5)


@pytest.mark.parametrize(
    ("facts", "status"),
    [(HEALTHY, exit_status.OK), (replace(HEALTHY, python="3.9.2"), exit_status.FAILED)],
)
def test_the_exit_status_says_whether_something_is_broken(facts, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *_: facts)
    assert cli.run(["doctor"]) == status
    shown = capsys.readouterr().out
    assert ("Nothing is wrong." in shown) == (status == exit_status.OK)
    assert shown.count("WRONG ") == (status == exit_status.FAILED)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with program(tmp_path / "out", *TP_RUNTIME, "doctor", "/no/such/folder") as running:
        assert running.wait() == exit_status.REFUSED
        assert len(running.text().splitlines()) == 1
