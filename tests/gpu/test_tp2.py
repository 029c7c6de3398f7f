"""Two GPUs: TP 2 over NCCL gives the tokens of TP 1, sampled either way and through torchrun."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.nccl_ranks import run_on_gpus
from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.ops.attention.registry import choose_backend
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.sharded_sampler import ShardedSampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=1.1, top_k=30, top_p=0.9, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, max_tokens=32, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3",
        tmp_path_factory.mktemp("tp2") / "model",
        head_dim=64,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=250,
    )


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(320) for _ in range(n)] for n in (1, 17, 40, 90)]


def generate(
    group: TPGroup, folder: Path, params: list[SamplingParams], sampler: str, dtype: torch.dtype
) -> list[list[int]]:
    backend, _ = choose_backend(
        "auto",
        head_size=64,
        dtype=dtype,
        block_size=16,
        windows=(None,),
        device=torch.device("cuda"),
    )
    engine = EngineInProcess(
        folder,
        device=f"cuda:{group.rank}",
        dtype=dtype,
        backend=backend,
        block_size=16,
        group=group,
        sampler={"gather": GatherSampler, "sharded": ShardedSampler}[sampler],
        max_num_batched_tokens=64,
    )
    seqs = [
        engine.add(str(i), prompt, p, seed=i)
        for i, (prompt, p) in enumerate(zip(prompts(), params, strict=True))
    ]
    engine.run()
    return [seq.generated_ids for seq in seqs]


@pytest.mark.parametrize("sampler", ["gather", "sharded"])
def test_float32_tokens_at_two_gpus_equal_one(folder: Path, sampler: str) -> None:
    for params in ([GREEDY] * 4, MIXED):
        alone = generate(TPGroup.single(), folder, params, "gather", torch.float32)
        both = run_on_gpus(2, generate, folder, params, sampler, torch.float32)
        assert both[0] == both[1] == alone


class CountingCommunicator:
    """Passes everything on and counts all-reduces."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.count = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._inner.all_reduce(x)  # type: ignore[attr-defined,no-any-return]


def count_all_reduces(group: TPGroup, folder: Path) -> tuple[int, int]:
    counting = CountingCommunicator(group.comm)
    group = TPGroup(group.rank, group.size, counting)  # type: ignore[arg-type]
    engine = EngineInProcess(folder, device=f"cuda:{group.rank}", group=group, run_ahead=1)
    engine.add("x", [1, 2, 3], GREEDY)
    engine.step()
    first = counting.count
    engine.step()
    return first, counting.count - first


def test_two_all_reduces_per_layer_and_one_for_the_embedding(folder: Path) -> None:
    for prefill, decode in run_on_gpus(2, count_all_reduces, folder):
        assert prefill == decode == 2 * 2 + 1


def reduce_bits(group: TPGroup) -> list[torch.Tensor]:
    x = torch.randn(257, 1024, device="cuda", generator=None) * (1 + group.rank)
    return [
        group.comm.all_reduce(x[:n].to(d).clone()).cpu()
        for n in (1, 32, 257)
        for d in (torch.float32, torch.bfloat16)
    ]


def test_every_rank_gets_the_same_bits(folder: Path) -> None:
    first, second = run_on_gpus(2, reduce_bits)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_client_talks_to_torchrun_over_nccl(folder: Path) -> None:
    from tp_runtime import Client

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "tp_runtime.launch.serve",
        str(folder),
        "--device",
        "cuda",
        "--dtype",
        "float32",
    ]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                client = Client()
                break
            except ConnectionError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
        with client:
            outputs = client.generate(prompts(), GREEDY)
    finally:
        server.terminate()
        server.wait(30)
    alone = generate(TPGroup.single(), folder, [GREEDY] * 4, "gather", torch.float32)
    assert [list(o.outputs[0].token_ids) for o in outputs] == alone
