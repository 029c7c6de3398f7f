"""One GPU: a real server (keeper, coordinator, worker on CUDA) answering a Python client."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny
from tp_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "qwen3",
        tmp_path_factory.mktemp("gpu") / "model",
        head_dim=64,
        num_attention_heads=8,
        num_key_value_heads=2,
    )


def test_the_server_gives_the_tokens_of_transformers_in_float32(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    rng = random.Random(4)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (3, 40, 90)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM(str(folder), device="cuda", dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(prompts, params)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    for prompt, output in zip(prompts, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got], device="cuda")).logits[0]
        assert got == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_the_server_runs_in_bfloat16(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True)
    with LLM(str(folder), device="cuda", dtype="bfloat16", max_model_len=256) as llm:
        first, again = (llm.generate([[5, 6, 7]], params)[0] for _ in range(2))
    assert len(first.outputs[0].token_ids) == 16
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
