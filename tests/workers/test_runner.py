"""Scheduler and runner together, against transformers and against the same request run alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny
from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.ops.attention.metadata import DecodeMetadata, LayerKV
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("runner") / "model")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(320) for _ in range(n)] for n in (1, 7, 8, 9, 31, 64, 100, 3)]


@pytest.fixture(scope="module")
def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' own tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(GREEDY.max_tokens or 0):
            with torch.inference_mode():
                logits = model(ids).logits[0, -1]
            top = logits.topk(2).values
            assert top[0] - top[1] > 1e-4
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("run_ahead", [1, 2, 8])
@pytest.mark.parametrize("budget", [13, 4096])
def test_a_mixed_batch_gives_the_tokens_of_transformers(
    folder: Path,
    prompts: list[list[int]],
    greedy: list[list[int]],
    run_ahead: int,
    budget: int,
) -> None:
    engine = EngineInProcess(
        folder, run_ahead=run_ahead, max_num_batched_tokens=budget, max_num_seqs=6
    )
    seqs = [engine.add(str(i), p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    assert [s.generated_ids for s in seqs] == greedy


def test_preemption_in_a_small_pool_changes_nothing(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    engine = EngineInProcess(folder, num_blocks=18, max_num_batched_tokens=32)
    seqs = [engine.add(str(i), p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    assert engine.scheduler.stats().counters.preemptions > 0
    assert [s.generated_ids for s in seqs] == greedy


def test_a_second_turn_hits_the_prefix_cache_and_changes_nothing(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    engine = EngineInProcess(folder)
    first = [engine.add(f"a{i}", p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    second = [engine.add(f"b{i}", p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    assert sum(s.num_cached_tokens for s in second) > 100
    assert [s.generated_ids for s in first] == [s.generated_ids for s in second] == greedy


MIXED = [
    SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, max_tokens=20, ignore_eos=True),
    SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        max_tokens=20,
        ignore_eos=True,
    ),
    SamplingParams(temperature=0.8, logit_bias={5: 4.0, 17: -9.0}, max_tokens=20),
    SamplingParams(temperature=1.0, min_p=0.1, min_tokens=6, stop_token_ids=[9], max_tokens=20),
    SamplingParams(temperature=0.5, logprobs=3, max_tokens=20, ignore_eos=True),
]


@pytest.mark.parametrize("blocks", [100, 16])
def test_every_request_gets_alone_what_it_gets_in_a_batch(
    folder: Path, prompts: list[list[int]], blocks: int
) -> None:
    """Same seed, same text: alone, beside others, through preemption."""
    alone = []
    for i, params in enumerate(MIXED):
        engine = EngineInProcess(folder, enable_prefix_caching=False, run_ahead=1)
        seq = engine.add("x", prompts[i], params, seed=100 + i)
        engine.run()
        alone.append(seq.generated_ids)
    engine = EngineInProcess(folder, num_blocks=blocks, max_num_batched_tokens=40)
    seqs = [engine.add(str(i), prompts[i], p, seed=100 + i) for i, p in enumerate(MIXED)]
    engine.run()
    assert [s.generated_ids for s in seqs] == alone


def test_logprobs_of_prompt_and_output_are_those_of_transformers(
    folder: Path, prompts: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(
        temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    engine = EngineInProcess(folder, max_num_batched_tokens=13)
    seq = engine.add("x", prompts[4], params)
    got = []
    prompt_logprobs = None
    while engine.scheduler.has_work:
        engine.step()
        for update in engine.updates:
            got.append(update.logprobs)
            prompt_logprobs = update.prompt_logprobs or prompt_logprobs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([list(seq.tokens)])
    with torch.inference_mode():
        expected = model(ids).logits[0].log_softmax(-1)
    assert prompt_logprobs is not None and prompt_logprobs[0] is None
    assert len(prompt_logprobs) == seq.prompt_len and len(got) == 5
    for position, entry in enumerate([*prompt_logprobs, *got]):
        if position == 0:
            continue
        assert entry is not None
        row, token = expected[position - 1], int(ids[0, position])
        assert entry.chosen.token_id == token
        assert entry.chosen.logprob == pytest.approx(float(row[token]), abs=2e-5)
        assert entry.chosen.rank == int((row > row[token]).sum()) + 1
        wanted = row.topk(2 if position < seq.prompt_len else 4)
        assert [t.token_id for t in entry.top] == wanted.indices.tolist()
        assert [t.logprob for t in entry.top] == pytest.approx(wanted.values.tolist(), abs=2e-5)


def test_a_row_with_nan_logits_fails_alone(folder: Path, prompts: list[list[int]]) -> None:
    """NaN in one row's hidden state: that request ends with an error, its neighbours go on."""
    engine = EngineInProcess(folder, enable_prefix_caching=False)
    alone = engine.add("alone", prompts[1], GREEDY)
    engine.run()
    model = engine.runner.model
    inner = model.compute_logits
    poisoned = {"row": 1, "calls": 0}

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = inner(hidden)
        poisoned["calls"] += 1
        if poisoned["calls"] == 4:
            logits[poisoned["row"]] = float("nan")
        return logits

    model.compute_logits = compute_logits  # type: ignore[method-assign]
    seqs = [engine.add(str(i), prompts[1], GREEDY) for i in range(3)]
    errors = []
    while engine.scheduler.has_work:
        engine.step()
        errors += [u for u in engine.updates if u.error is not None]
    assert [u.seq for u in errors] == [seqs[1]]
    assert "finite" in str(errors[0].error)
    assert seqs[0].generated_ids == seqs[2].generated_ids == alone.generated_ids
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("run_ahead", [1, 8])
def test_replayed_steps_give_the_same_tokens(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]], run_ahead: int
) -> None:
    engine = EngineInProcess(folder, graph_sizes=(1, 2, 4, 8), run_ahead=run_ahead)
    seqs = [engine.add(str(i), p, GREEDY) for i, p in enumerate(prompts)]
    engine.run()
    assert [s.generated_ids for s in seqs] == greedy


@pytest.mark.parametrize("graph_sizes", [(), (8,)])
def test_sampling_of_every_kind_through_padded_replays(
    folder: Path, prompts: list[list[int]], graph_sizes: tuple[int, ...]
) -> None:
    """Padding rows hold parameters of requests that ended; they must not show."""
    results = []
    for sizes in ((), graph_sizes):
        engine = EngineInProcess(folder, graph_sizes=sizes)
        seqs = [engine.add(str(i), prompts[i], p, seed=9 + i) for i, p in enumerate(MIXED)]
        engine.run()
        results.append([s.generated_ids for s in seqs])
    assert results[0] == results[1]


def test_padding_rows_are_inert_even_when_unset_memory_is_nan(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    """Every slot of the cache that no request owns is NaN, stale tables point anywhere."""
    engine = EngineInProcess(folder, graph_sizes=(8,), enable_prefix_caching=False)
    for layer in engine.runner.kv:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    engine.runner.state.block_tables.fill_(engine.limits.num_blocks - 1)
    for i in (2, 4):
        seq = engine.add(str(i), prompts[i], GREEDY)
        engine.run()
        assert seq.generated_ids == greedy[i]
    last = engine.runner.kv[0].k[-1]
    assert bool(last.isnan().all()), "a padding row wrote to the block its stale table names"


@pytest.mark.parametrize("sizes", [(), (1, 2, 4)])
def test_what_the_layers_share_is_prepared_once_a_step_for_every_window(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Eagerly and in replayed steps; the first step of a request decodes nothing."""
    seen: list[tuple[DecodeMetadata, set[int | None]]] = []

    class Noting(ReferenceBackend):
        def prepare_decode(
            self, meta: DecodeMetadata, kv: LayerKV, windows: Iterable[int | None]
        ) -> None:
            seen.append((meta, set(windows)))

    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    folder = make_tiny("qwen2", tmp_path / "model", **layers, use_sliding_window=True)
    engine = EngineInProcess(folder, backend=Noting(), graph_sizes=sizes)
    seen.clear()  # what recording prepared
    engine.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    engine.run()
    assert [windows for _, windows in seen] == [{None, 16}] * 3
    assert all(meta.context_lens.max() > 3 for meta, _ in seen)
