"""What of a model is tuned, and where nothing is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.ops.fake_products import FakeLibrary, FakeTimer, aligned, named
from tests.tiny_models import make_tiny
from tp_runtime.engine_config import EngineConfig
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.cublas_lt import CublasLt
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.linear import MergedColumnParallelLinear
from tp_runtime.ops.product import MAX_SILU_ROWS, MAX_SKINNY_ROWS, MAX_SMALL_SKINNY_ROWS
from tp_runtime.ops.tuned_product import DECODE_ROWS, FEWEST_ROWS
from tp_runtime.transport.heartbeat import Phase
from tp_runtime.workers import tune_products as module
from tp_runtime.workers.loader import fill_dummy
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.models.registry import build_model
from tp_runtime.workers.tune_products import family_of, layers_by_shape, tune_products
from tp_runtime.workers.worker import Worker

CONFIG = EngineConfig(model="m", max_num_seqs=100, max_num_batched_tokens=5000)


def model_of(folder: Path, kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    config = ModelConfig.from_folder(make_tiny(kind, folder / kind))
    model = build_model(config, TPGroup.single(), dtype, "cpu", ReferenceBackend(), 64)
    fill_dummy(model, seed=0)
    return model


def tuned_names(model: CausalLM) -> set[str]:
    tuned = [layer for same in layers_by_shape(model) for layer in same]
    return {name for name, layer in model.named_modules() if any(layer is other for other in tuned)}


class Messages:
    """What a call says and how often it beats."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1

    def tune(
        self, model: CausalLM, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, log=True
    ) -> None:
        tune_products(
            model,
            CONFIG,
            dtype,
            torch.device(device),
            beat=self.beat,
            say=self.said.append,
            log=log,
        )


def test_layers_are_tuned_by_shape_and_those_with_a_bias_in_the_product_are_not(
    tmp_path: Path,
) -> None:
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    names = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    model = model_of(tmp_path)
    assert tuned_names(model) == {"lm_head", *names}
    shapes = layers_by_shape(model)
    assert all(len({layer.weight.shape for layer in same}) == 1 for same in shapes)
    biased = {name for name in names if name.endswith("qkv_proj")}
    assert tuned_names(model_of(tmp_path, "qwen2")) == {"lm_head", *names} - biased


def test_rows_are_those_of_decode_steps_and_of_prefills(
    tmp_path: Path,
) -> None:
    shapes = layers_by_shape(model_of(tmp_path))
    by_type = {type(same[0]).__name__: family_of(same, CONFIG) for same in shapes}
    assert by_type["QKVParallelLinear"].rows == [32, 48, 64, 96, 128, 2048, 4096]
    assert by_type["ParallelLMHead"].rows == [32, 48, 64, 96, 128]
    # In the tiny model gate and up have the shape of q, k and v, and down that of o.
    assert len(by_type["QKVParallelLinear"].weights) == 4


def test_gate_and_up_of_a_few_rows_are_one_kernel_with_their_activation() -> None:
    place = {"group": TPGroup.single(), "dtype": torch.bfloat16, "device": "meta"}
    large = MergedColumnParallelLinear(4096, [12288, 12288], **place)
    assert MAX_SILU_ROWS == 48
    assert family_of([large], CONFIG).rows == [64, 96, 128, 2048, 4096]


def test_sizes_that_are_tuned_begin_where_our_own_kernels_may_be_behind() -> None:
    assert MAX_SMALL_SKINNY_ROWS < FEWEST_ROWS <= MAX_SKINNY_ROWS
    assert DECODE_ROWS[0] <= MAX_SKINNY_ROWS


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)], ids=str
)
def test_nothing_happens_on_a_cpu_and_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    def unexpected(device: torch.device) -> CublasLt:
        raise AssertionError("the library was opened")

    monkeypatch.setattr(module, "CublasLt", unexpected)
    model, messages = model_of(tmp_path), Messages()
    messages.tune(model, device, dtype)
    assert (messages.said, messages.beats) == ([], 0)
    assert all(layer.tuned is None for same in layers_by_shape(model) for layer in same)


@pytest.mark.parametrize("log", [True, False])
def test_without_the_library_one_rank_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, log: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    model = model_of(tmp_path)
    Messages().tune(model, log=log)
    assert [("libcublasLt.so.99" in record.message) for record in caplog.records] == [True] * log
    assert all(layer.tuned is None for same in layers_by_shape(model) for layer in same)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLibrary:
    """The whole way on the CPU, with a library of which one algorithm is fast."""
    library = FakeLibrary({"a": 70, "b": 90})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CublasLt", lambda device: library)
    monkeypatch.setattr(module, "GraphTimer", lambda device: FakeTimer(library))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    return library


def test_every_layer_gets_the_choices_of_its_shape_and_the_next_start_reads_them(
    tmp_path: Path, fake_gpu: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    first, again = Messages(), Messages()
    first.tune(model_of(tmp_path / "first"))
    model = model_of(tmp_path / "second")
    again.tune(model)
    for same in layers_by_shape(model):
        for layer in same:
            assert layer.tuned is not None
            assert layer.tuned.algorithm(48) == named("a")
    assert model.lm_head.tuned is not None
    assert model.lm_head.tuned.algorithm(2048) is None
    assert len(first.said) == 1
    assert first.beats >= 19
    assert again.said == []
    assert len(list((tmp_path / "cache/tp_runtime/products").iterdir())) == 3
    (record,) = caplog.records  # the second start has nothing to say
    assert "19 of 19 matrix products use another algorithm" in record.message


def test_a_tuned_model_computes_what_it_did(tmp_path: Path, fake_gpu: FakeLibrary) -> None:
    model = model_of(tmp_path)
    x = aligned(48, model.config.hidden_size)
    head = model.lm_head
    head.weight.data = aligned(*head.weight.shape)
    want = head(x)
    Messages().tune(model)
    fake_gpu.launched.clear()
    assert torch.equal(head(x), want)
    assert fake_gpu.launched == [named("a")]


@pytest.mark.parametrize("disabled", [False, True])
def test_a_worker_tunes_in_its_warm_up_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeLibrary, disabled: bool
) -> None:
    worker, entered, sent = object.__new__(Worker), [], []
    worker.config = msgspec.structs.replace(CONFIG, disable_product_tuning=disabled)
    worker.rank = 0
    worker.status = SimpleNamespace(send=sent.append)
    monkeypatch.setattr(worker, "enter", entered.append)
    model = model_of(tmp_path)
    worker._tune_products(model, torch.bfloat16, torch.device("cuda"))
    assert (model.lm_head.tuned is None) == disabled
    assert set(entered) == (set() if disabled else {Phase.WARM_UP})
    assert [(message.rank, message.phase) for message in sent] == [(0, "warm_up")] * (not disabled)


def test_a_user_without_a_home_folder_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert module._folder() is None
