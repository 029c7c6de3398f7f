"""One GPU: scheduler, runner and the chosen back-end together, beside transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.registry import choose_backend
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.workers.loader import load_weights
from tp_runtime.workers.models.registry import build_model

pytestmark = pytest.mark.gpu

KINDS = {
    "qwen3": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "llama": {
        "hidden_size": 144,
        "head_dim": 64,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return make_tiny(kind, tmp_path_factory.mktemp("gpu") / kind, **KINDS[kind])


def reference_model(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda()


def test_float32_tokens_equal_transformers_on_the_gpu(folder: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (1, 15, 16, 17, 90)]
    model = reference_model(folder, torch.float32)
    config = ModelConfig.from_folder(folder)
    backend, _ = choose_backend(
        "auto",
        head_size=config.head_dim,
        dtype=torch.float32,
        block_size=16,
        windows=config.windows,
        device=torch.device("cuda"),
    )
    engine = EngineInProcess(
        folder, device="cuda", backend=backend, block_size=16, max_num_batched_tokens=48
    )
    seqs = [engine.add(str(i), p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    for seq, prompt in zip(seqs, prompts, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([list(seq.tokens)], device="cuda")
            logits = model(ids).logits[0]
        expected = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        top = logits[len(prompt) - 1 : -1].topk(2).values
        # Far above what float32 differs by in another order of addition (about 2e-6 here).
        assert float((top[:, 0] - top[:, 1]).min()) > 2e-5
        assert seq.generated_ids == expected


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(folder: Path) -> None:
    from tests.workers.forward import all_logits

    rng = random.Random(2)
    ids = torch.tensor([rng.randrange(320) for _ in range(64)], device="cuda")
    config = ModelConfig.from_folder(folder)
    backend, _ = choose_backend(
        "auto",
        head_size=config.head_dim,
        dtype=torch.bfloat16,
        block_size=None,
        windows=config.windows,
        device=torch.device("cuda"),
    )
    model = build_model(config, TPGroup.single(), torch.bfloat16, "cuda", backend, 256)
    load_weights(model, folder)
    with torch.inference_mode():
        ours = all_logits(model, config, backend, ids)
        exact = reference_model(folder, torch.float32)(ids[None]).logits[0]
        theirs = reference_model(folder, torch.bfloat16)(ids[None]).logits[0].float()
    scale = float(exact.abs().max())
    their_error = float((theirs - exact).abs().max()) / scale
    our_error = float((ours - exact).abs().max()) / scale
    assert our_error < 1.5 * their_error + 1e-3, (our_error, their_error)


def test_seeded_draws_on_the_gpu_do_not_depend_on_the_batch(folder: Path) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, ignore_eos=True)
    prompts = [[7, 8, 9], [1] * 20, [30, 31]]

    def run(which: list[int]) -> list[list[int]]:
        engine = EngineInProcess(folder, device="cuda", enable_prefix_caching=False)
        seqs = [engine.add(str(i), prompts[i], params, seed=50 + i) for i in which]
        engine.run()
        return [s.generated_ids for s in seqs]

    assert run([0, 1, 2]) == [run([i])[0] for i in range(3)]
