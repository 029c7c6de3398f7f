"""One GPU: cuBLASLt's algorithms beside torch, through the search, the file and the layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_runtime.engine_config import EngineConfig
from tp_runtime.ops.cublas_lt import ALGORITHM_BYTES, CublasLt, CublasLtError, Problem
from tp_runtime.ops.embedding import ParallelLMHead
from tp_runtime.ops.graph_timer import GraphTimer
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.linear import ColumnParallelLinear, RowParallelLinear
from tp_runtime.ops.product import product
from tp_runtime.ops.product_search import OutOfTime, ProductSearch
from tp_runtime.ops.tuned_product import TunedProduct
from tp_runtime.workers import tune_products as module
from tp_runtime.workers.tune_products import layers_by_shape, tune_products

pytestmark = pytest.mark.gpu

SMALL = [(576, 576), (192, 64), (3072, 576), (331, 96)]
"""Outputs, inputs."""
QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
DTYPES = [torch.bfloat16, torch.float16]
FEW = (17, 48, 100, 224, 512)
MANY = (2048, 3001)


@pytest.fixture(scope="module")
def library() -> CublasLt:
    return CublasLt(torch.device("cuda", torch.cuda.current_device()))


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return drawn(outputs, inputs, dtype=dtype, seed=2) * inputs**-0.5


def assert_rounded_once(got: Tensor, x: Tensor, weight: Tensor) -> None:
    """Half a step of the narrow type, and the last bits of a float32 sum."""
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[got.dtype]
    want = F.linear(x.double(), weight.double())
    torch.testing.assert_close(got.double(), want, rtol=1.01 * step, atol=1e-4)


def all_candidates(library: CublasLt, problem: Problem) -> list[bytes]:
    proposals = [
        library.candidates(problem._replace(rows=rows)) for rows in (32, *FEW, *MANY, 8192)
    ]
    return list(dict.fromkeys(algorithm for some in proposals for algorithm in some))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [*SMALL, *QWEN3_8B])
def test_every_algorithm_that_suits_gives_the_product(
    library: CublasLt, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = weight_of(outputs, inputs, dtype)
    tried = 0
    for rows in (*FEW, MANY[0]):
        x, y = drawn(rows, inputs, dtype=dtype), weight.new_empty(rows, outputs)
        problem = Problem.of(x, weight, y)
        want = F.linear(x.float(), weight.float())
        bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype] * (want.abs() + 0.05)
        for algorithm in all_candidates(library, problem):
            assert len(algorithm) == ALGORITHM_BYTES
            launch = library.prepare(problem, algorithm)
            if launch is None:
                continue
            y.fill_(float("nan"))
            launch(x, weight, y)
            assert bool(((y.float() - want).abs() <= bound).all()), (rows, algorithm.hex())
            tried += 1
    assert tried >= 10 or inputs % 8 or outputs % 8


def test_the_version_is_that_of_torchs_cuda(library: CublasLt) -> None:
    assert torch.version.cuda is not None
    assert library.version // 10_000 == int(torch.version.cuda.partition(".")[0])


def test_an_algorithm_that_never_was_is_refused_and_not_run(library: CublasLt) -> None:
    x, weight, y = drawn(48, 256), weight_of(128, 256), drawn(48, 128)
    problem = Problem.of(x, weight, y)
    assert library.prepare(problem, b"\xff" * ALGORITHM_BYTES) is None


def test_another_dtype_is_refused_in_words(library: CublasLt) -> None:
    x, weight, y = drawn(48, 64).float(), weight_of(32, 64).float(), drawn(48, 32).float()
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        library.candidates(Problem.of(x, weight, y))


def test_a_failing_call_names_itself_and_the_status(library: CublasLt) -> None:
    with pytest.raises(CublasLtError, match=r"cublasLtMatmul returned CUBLAS_STATUS_INVALID_VALUE"):
        library._api.check("cublasLtMatmul", 7)


def tuned(library: CublasLt, rows: int, outputs: int, inputs: int) -> TunedProduct:
    """By the heuristic's last proposal, so that it is not the one that torch takes."""
    x, weight, y = drawn(rows, inputs), weight_of(outputs, inputs), drawn(rows, outputs)
    return TunedProduct(library, {rows: library.candidates(Problem.of(x, weight, y))[-1]})


def test_rows_of_a_wider_tensor_and_a_given_out(library: CublasLt) -> None:
    choice, weight = tuned(library, 96, 512, 1024), weight_of(512, 1024)
    wide, out = drawn(96, 3072), drawn(96, 1536)
    for part in range(3):
        x, y = wide[:, 1024 * part : 1024 * (part + 1)], out[:, 512 * part : 512 * (part + 1)]
        assert choice.multiply(x, weight, y) is y
        assert_rounded_once(y, x, weight)
        assert_rounded_once(product(x, weight, tuned=choice), x, weight)


def test_parts_of_a_prefill(library: CublasLt) -> None:
    choice, weight = tuned(library, 2048, 1024, 1024), weight_of(1024, 1024)
    x = drawn(6500, 1024)
    out = x.new_empty(6500, 1024)
    for rows, y in zip(x.chunk(3), out.chunk(3), strict=True):
        assert choice.multiply(rows, weight, y) is y
    assert_rounded_once(out, x, weight)


def test_a_recorded_product_reads_what_lies_there_when_it_is_replayed(library: CublasLt) -> None:
    choice, weight, x = tuned(library, 48, 4096, 4096), weight_of(4096, 4096), drawn(48, 4096)
    product(x, weight, tuned=choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = product(x, weight, tuned=choice)
        z = product(y, weight, tuned=choice)
    for seed in (5, 6, 7):
        x.copy_(drawn(48, 4096, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_rounded_once(y, x, weight)
        assert_rounded_once(z, y, weight)


def test_the_timer_sees_what_takes_longer() -> None:
    timer = GraphTimer(torch.device("cuda", torch.cuda.current_device()))
    small, large = (torch.ones(size, device="cuda") for size in (1 << 20, 1 << 28))
    of_small, of_large = (timer.record(lambda number, x=x: x.mul_(1.0), 8) for x in (small, large))
    assert 0 < 10 * of_small() < of_large()


def test_a_search_gives_an_algorithm_that_holds_or_none(library: CublasLt) -> None:
    search = ProductSearch(library, GraphTimer(torch.device("cuda", torch.cuda.current_device())))
    weights = [weight_of(4096, 12288) for _ in range(4)]
    for rows in (192, 224, 2048):
        algorithm = search.fastest(weights, rows)
        if algorithm is not None:
            assert search.confirm(weights[1], rows, algorithm)
    stopped = ProductSearch(library, GraphTimer(weights[0].device), lambda: False)
    with pytest.raises(OutOfTime):
        stopped.fastest(weights, 192)


class Layers(nn.Module):
    """Two layers and a head, as the worker sees a model."""

    def __init__(self) -> None:
        super().__init__()
        place = {"group": TPGroup.single(), "dtype": torch.bfloat16, "device": "cuda"}
        self.up = ColumnParallelLinear(1024, 4096, **place)
        self.down = RowParallelLinear(4096, 1024, **place)
        self.lm_head = ParallelLMHead(32000, 1024, **place)
        for parameter in self.parameters():
            parameter.data.normal_(0, parameter.shape[1] ** -0.5)


def test_a_start_writes_its_choices_and_the_next_one_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "BUDGET_S", 60.0)
    device = torch.device("cuda", torch.cuda.current_device())
    config = EngineConfig(model="m", max_num_seqs=96, max_num_batched_tokens=2048)
    said: list[str] = []
    tables, model = [], Layers()
    for _ in range(2):
        model = Layers()
        tune_products(
            model, config, torch.bfloat16, device, beat=lambda: None, say=said.append, log=True
        )
        tables.append([same[0].tuned._algorithms for same in layers_by_shape(model)])
    assert len(said) == 1
    assert tables[0] == tables[1]
    assert all(tables[0])
    files = list((tmp_path / "tp_runtime" / "products").iterdir())
    assert len(files) == 3
    for rows in (48, 64, 96, 2048):
        x = drawn(rows, 1024)
        hidden = model.up(x)
        assert_rounded_once(hidden, x, model.up.weight)
        assert_rounded_once(model.down(hidden), hidden, model.down.weight)


def test_what_tuning_needed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a workspace of the products and one of torch's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, config = Layers(), EngineConfig(model="m", max_num_seqs=64)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    device = torch.device("cuda", torch.cuda.current_device())
    tune_products(
        model, config, torch.bfloat16, device, beat=lambda: None, say=lambda text: None, log=False
    )
    assert torch.cuda.memory_reserved() - before <= 160 << 20
