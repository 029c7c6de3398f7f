"""Loading: every tensor is accounted for, a rank reads only its range, errors name the culprit."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny_models import make_tiny, random_tensors, tiny_config, write_checkpoint
from tests.workers.model_harness import PagedModel, load_model
from tests.workers.parity import Pools, differences, forced_ids, reference, run_on_ranks
from tp_runtime.errors import WeightsError
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import SingleCommunicator, TPGroup
from tp_runtime.workers import loader
from tp_runtime.workers.checkpoint import Checkpoint
from tp_runtime.workers.loader import count_parameters, fill_dummy, load_weights, model_digest
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.models.registry import build_model

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def build(
    folder: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """An unfilled model; enough for loading, which needs no communication."""
    group = TPGroup(rank, size, SingleCommunicator())
    config = ModelConfig.from_folder(folder)
    return build_model(config, group, dtype, "cpu", ReferenceBackend(), 64)


def error_of(folder: Path) -> str:
    """The message of the WeightsError that loading `folder` raises; it must be one sentence."""
    with pytest.raises(WeightsError) as caught:
        load_weights(build(folder), folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ------------------------------------------------------------------ good checkpoints


@pytest.mark.parametrize("layout", ["single", "indexed", "shards without index", "unaligned"])
def test_layouts_give_the_same_parameters(layout: str, folder: Path, tmp_path: Path) -> None:
    single = build(folder)
    load_weights(single, folder)
    other = tmp_path / "other"
    make_tiny("llama", other, shards=1 if layout in ("single", "unaligned") else 3)
    if layout == "shards without index":
        (other / "model.safetensors.index.json").unlink()
    if layout == "unaligned":
        _shift_header(other / "model.safetensors")
    model = build(other)
    load_weights(model, other)
    for (name, wanted), given in zip(single.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(given, wanted), name


def _shift_header(path: Path) -> None:
    """A header of odd length, as writers leave it that do not align."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


class _Recorded:
    """A tensor that adds up the elements that are read of it."""

    def __init__(self, tensor: Tensor, read: list[int]) -> None:
        self._tensor, self._read = tensor, read
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def numel(self) -> int:
        return self._tensor.numel()

    def element_size(self) -> int:
        return self._tensor.element_size()

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        part = self._tensor[index]
        self._read.append(part.numel())
        return part


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_reads_its_share_and_nothing_else(
    size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = Checkpoint.__getitem__
    monkeypatch.setattr(
        Checkpoint, "__getitem__", lambda self, name: _Recorded(whole(self, name), read)
    )
    for rank in range(size):
        read.clear()
        model = build(folder, rank, size)
        load_weights(model, folder)
        head = model.lm_head
        padding = 2 * (head.shard.padded - head.shard.size) * head.hidden_size
        assert sum(read) == count_parameters(model) - padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_converted_to_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, dtype=torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    model = build(folder, dtype=dtype)
    load_weights(model, folder)
    norm = model.model.norm.weight
    assert norm.dtype == dtype
    assert torch.equal(norm, stored["model.norm.weight"].to(dtype))


def test_progress_is_told_in_sentences(folder: Path) -> None:
    said: list[str] = []
    load_weights(build(folder), folder, said.append)
    assert said[0].startswith("Loading weights: 0 % of 0.00 GiB")
    assert said[-1].startswith("Weights loaded: 0.00 GiB in ")


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    rewrite(
        folder,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    load_weights(build(folder), folder)


# ------------------------------------------------------------------ tied heads


TIED: dict[str, Any] = {"tie_word_embeddings": True, "vocab_size": 347}


def _tied_folder(case: str, folder: Path) -> Path:
    tensors = random_tensors(tiny_config("qwen3", **TIED))
    embedding = tensors["model.embed_tokens.weight"]
    more = {
        "absent": {},
        "equal": {"lm_head.weight": embedding.clone()},
        "different": {"lm_head.weight": embedding.flip(0).contiguous()},
    }
    make_tiny("qwen3", folder, extra_tensors=more.get(case), **TIED)
    if case == "only the head":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        write_checkpoint(folder, tensors)
    return folder


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", ["absent", "equal", "different", "only the head"])
def test_tied_head_is_what_transformers_makes_of_it(
    case: str, size: int, tmp_path: Path, gloo_pool: Pools
) -> None:
    """A head in the checkpoint of a tied model: equal to the embedding, or different (then both
    are used), or alone (then it is the embedding too)."""
    folder = _tied_folder(case, tmp_path)
    results = run_on_ranks(gloo_pool, size, folder, greedy=False)
    assert differences(results, reference(folder, greedy=False)) == []


@pytest.mark.parametrize(
    ("case", "shared"), [("equal", True), ("different", False), ("only the head", True)]
)
def test_only_a_head_that_differs_has_a_storage_of_its_own(
    case: str, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(TPGroup.single(), _tied_folder(case, tmp_path), 64)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) is shared
    assert ("tie_word_embeddings" in caplog.text) is not shared


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    rewrite(folder, lambda t: t.__delitem__("lm_head.weight"))
    assert "lacks lm_head.weight;" in error_of(folder)


# ------------------------------------------------------------------ bad checkpoints


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda t: t.__delitem__(K_PROJ))
    message = error_of(folder)
    assert f"lacks {K_PROJ};" in message
    assert str(folder) in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    rewrite(folder, drop)
    assert "and 5 more tensors" in error_of(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.2.self_attn.k_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "score.weight",
    ],
)
def test_unexpected_tensors_are_named(name: str, folder: Path) -> None:
    rewrite(folder, lambda t: t.update({name: torch.ones(32)}))
    assert f"holds {name}, which the model does not have" in error_of(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (K_PROJ, (33, 64)),
        (K_PROJ, (32, 63)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 65)),
        ("model.layers.0.mlp.down_proj.weight", (96, 64)),
        ("model.embed_tokens.weight", (384, 64)),
        ("lm_head.weight", (330, 64)),
        ("model.norm.weight", (65,)),
    ],
)
def test_wrong_shape_names_tensor_file_and_both_shapes(
    name: str, shape: tuple[int, ...], folder: Path
) -> None:
    right = load_file(folder / "model.safetensors")[name].shape
    rewrite(folder, lambda t: t.update({name: torch.ones(shape)}))
    message = error_of(folder)
    for part in (name, "model.safetensors", str(list(shape)), str(list(right))):
        assert part in message


def test_wrong_shape_is_found_on_a_rank_whose_range_would_fit(folder: Path) -> None:
    """Rank 0 of 2 keeps rows that a longer tensor has as well."""
    rewrite(folder, lambda t: t.update({K_PROJ: torch.ones(64, 64)}))
    with pytest.raises(WeightsError, match="k_proj"):
        load_weights(build(folder, 0, 2), folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), K_PROJ: torch.ones(32, 64)}, second)
    message = error_of(folder)
    assert f"{K_PROJ} is twice" in message
    assert second.name in message


def test_a_file_cut_short_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    for size in (len(raw) - 1, len(raw) // 2, 200, 9):
        file.write_bytes(raw[:size])
        assert f"{file} is cut short" in error_of(folder)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"<!DOCTYPE html><html>Sign in to download</html>", b"\0" * 64]
)
def test_a_file_of_another_kind_is_named(content: bytes, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    message = error_of(folder)
    assert str(file) in message
    assert "download it again" in message


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32"}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-8,4]}}',
    ],
)
def test_a_broken_header_is_named(header: bytes, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    assert str(file) in error_of(folder)


def test_shape_and_bytes_that_do_not_fit_together_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header[K_PROJ]["shape"][0] -= 1
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert K_PROJ in error_of(folder)


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = error_of(folder)
    assert "lacks model-00002-of-00003.safetensors (1 of the 3 files" in message


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "model.extra.weight is not in" in error_of(folder)
    index.write_text("{")
    assert f"{index} is not valid JSON" in error_of(folder)
    index.write_text('{"metadata": {}}')
    assert "has no weight_map" in error_of(folder)


def test_quantised_tensors_are_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({K_PROJ: torch.ones(32, 64, dtype=torch.int8)}))
    message = error_of(folder)
    assert K_PROJ in message
    assert "I8" in message


def test_other_formats_and_empty_folders_are_told_apart(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in error_of(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin and not as safetensors" in error_of(folder)


# ------------------------------------------------------------------ our own mistakes


def test_a_parameter_that_nothing_can_fill_is_named(folder: Path) -> None:
    model = build(folder)
    model.model.add_module("extra", nn.Linear(2, 2))
    with pytest.raises(WeightsError, match=r"model\.extra\.weight belongs to Linear"):
        load_weights(model, folder)


def test_a_layer_that_fills_only_a_part_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.empty` that nobody filled gives fluent nonsense."""
    model = build(folder)
    down = model.get_submodule("model.layers.1.mlp.down_proj")
    monkeypatch.setattr(down, "load_weight", lambda *args: 17)
    with pytest.raises(WeightsError, match=r"17 of the .* elements of model\.layers\.1\.mlp\.down"):
        load_weights(model, folder)


# ------------------------------------------------------------------ dummy weights


def _dummy_logits(group: TPGroup, folder: str, seed: int) -> Tensor | None:
    config = ModelConfig.from_folder(folder)
    model = build_model(config, group, torch.float32, "cpu", ReferenceBackend(), 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    fill_dummy(model, seed)
    paged = PagedModel(model, 8)
    with torch.inference_mode():
        _, hidden = paged.step([], (paged.sequence(16), forced_ids(config.vocab_size, 16)))
        gathered: Tensor | None = model.lm_head.gather(model.compute_logits(hidden))
    return gathered


def test_dummy_weights_are_the_same_model_at_every_tp_size(
    tmp_path: Path, gloo_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("qwen3", tmp_path, attention_bias=True)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    whole = _dummy_logits(TPGroup.single(), str(folder), 5)
    assert whole is not None
    assert whole.std() > 0
    for size in (2, 3):
        split = gloo_pool(size).run(_dummy_logits, str(folder), 5)[0]
        assert torch.allclose(split, whole, atol=1e-5 * float(whole.abs().max()), rtol=0)
    again = _dummy_logits(TPGroup.single(), str(folder), 5)
    other = _dummy_logits(TPGroup.single(), str(folder), 6)
    assert torch.equal(again, whole)  # type: ignore[arg-type]
    assert not torch.allclose(other, whole, atol=1e-3)  # type: ignore[arg-type]


def test_ranges_of_a_dummy_tensor_do_not_depend_on_where_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tp_runtime.workers import random_source

    monkeypatch.setattr(random_source, "_BLOCK_ELEMENTS", 64)
    source = random_source.RandomSource("a.weight", (50, 10), 1, torch.device("cpu"))
    whole = source[0:50, 0:10]
    for rows, columns in (((0, 7), (3, 9)), ((6, 19), (0, 10)), ((49, 50), (9, 10))):
        part = source[slice(*rows), slice(*columns)]
        assert torch.equal(part, whole[slice(*rows), slice(*columns)])


# ------------------------------------------------------------------ digest


def test_digest_tells_apart_what_ranks_must_agree_on(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny("llama", tmp_path))
    tokenizer = tmp_path / "tokenizer.json"
    first = model_digest(config, 64, torch.float32)
    assert model_digest(ModelConfig.from_folder(tmp_path), 64, torch.float32) == first
    others = {
        model_digest(config, 65, torch.float32),
        model_digest(config, 64, torch.bfloat16),
        model_digest(replace(config, rms_norm_eps=1e-5), 64, torch.float32),
    }
    tokenizer.write_text(tokenizer.read_text().replace("the", "teh"))
    others.add(model_digest(ModelConfig.from_folder(tmp_path), 64, torch.float32))
    assert len(others | {first}) == 5


def test_digest_covers_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(tiny_config("llama"))
    before = model_digest(config, 64, torch.float32)
    monkeypatch.setattr(loader, "_code_digest", lambda: "another version")
    assert model_digest(config, 64, torch.float32) != before
