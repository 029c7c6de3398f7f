"""Whatever happens around it, a request gets the tokens it would get alone, and no block is lost.

Random arrivals, cancels, preemptions, late masks of grammars, crashes of the workers and orders of
plan and commit, over block sizes, small pools, budgets, run-ahead, prefix cache on and off. Prompts
come from few ids and few beginnings, so that prefixes are shared, and the vocabulary is small, so
that end ids are met.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq, with_grammar
from tests.coordinator.fake_worker import logprob_of
from tp_runtime.coordinator import block_tables
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.errors import InvalidRequestError, OverloadedError
from tp_runtime.messages import StepPlan

VOCAB_SIZE = 8

limits = st.fixed_dictionaries(
    {
        "vocab_size": st.just(VOCAB_SIZE),
        "max_model_len": st.integers(8, 40),
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "num_blocks": st.integers(6, 24),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 20),
        "run_ahead": st.sampled_from([1, 2, 3, 8]),
        "enable_prefix_caching": st.booleans(),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset((0,)), frozenset((0, 5))]),
        "graph_sizes": st.sampled_from([(), (1, 2, 4)]),
        "max_num_queued_requests": st.integers(1, 8),
    }
)


def _request(rng: random.Random, name: int) -> list[Sequence]:
    base = [[1, 2, 1, 2] * 8, [3, 4] * 16, [1, 2, 3] * 10][rng.randrange(3)]
    prompt = base[: rng.randint(1, 20)] + [rng.randrange(VOCAB_SIZE)] * rng.randint(0, 2)
    max_tokens = rng.choice([0, 1, 2, 5, 9, 15, None])
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1.0]),
        "ignore_eos": rng.random() < 0.3,
    }
    if rng.random() < 0.2 and max_tokens:
        params["min_tokens"] = rng.randint(0, max_tokens)
    if rng.random() < 0.2:
        params["stop_token_ids"] = [rng.randrange(VOCAB_SIZE)]
    if rng.random() < 0.2:
        params["stop"] = ["x"]
    if rng.random() < 0.2:
        params["presence_penalty"] = 1.0
    if rng.random() < 0.2:
        params["prompt_logprobs"] = 0
    if rng.random() < 0.2:
        params["logprobs"] = 1
    samples = rng.choice([1, 1, 1, 3])
    seed = rng.randrange(5)
    seqs = [
        make_seq(name, prompt, max_tokens, sample=i, seed=seed, **params) for i in range(samples)
    ]
    if rng.random() < 0.3 and "min_tokens" not in params:  # which could leave no id at all
        seqs = [with_grammar(seq) for seq in seqs]
    return seqs


def _act(drive: Drive, rng: random.Random, action: str, name: int) -> None:
    scheduler = drive.scheduler
    if action == "add":
        seqs = _request(rng, name)
        try:
            drive.add(*seqs)
        except (InvalidRequestError, OverloadedError):
            for seq in seqs:
                del drive.seqs[seq.key], drive.outputs[seq.key]
    elif action == "plan":
        drive.plan()
    elif action == "record":
        drive.plan(records_graph=True)
    elif action == "commit" and drive.under_way:
        drive.commit(rng.randint(1, len(drive.under_way)))
    elif action == "cancel" and drive.seqs:
        key = rng.choice(list(drive.seqs))
        if scheduler.cancel(key):
            drive.ends[key] = "cancelled"
    elif action == "preempt":
        scheduler.preempt_youngest()
    elif action == "masks":
        drive.make_masks()
    elif action == "crash":
        drive.crash()
    elif action == "spare":
        scheduler.do_spare_work()
    elif action == "only":
        alive = [key for key in drive.seqs if key not in drive.ends]
        scheduler.admit_only(rng.sample(alive, min(len(alive), 2)))
    elif action == "all":
        scheduler.admit_only(None)


actions = st.lists(
    st.sampled_from(
        ["add"] * 4
        + ["plan"] * 8
        + ["commit"] * 6
        + ["masks"] * 3
        + ["cancel", "preempt", "crash", "only", "all", "spare", "record"]
    ),
    min_size=40,
    max_size=160,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(limits=limits, actions=actions, seed=st.integers(0, 2**16))
@patch.multiple(block_tables, FEW_LATE=1, MOST_LATE=4, AT_ONCE=2)
def test_every_request_gets_its_own_tokens_and_no_block_is_lost(limits, actions, seed):
    drive = Drive(make_limits(**limits))
    rng = random.Random(seed)
    for name, action in enumerate(actions):
        _act(drive, rng, action, name)
        drive.scheduler.check_invariants()
        assert len(drive.under_way) <= limits["run_ahead"]
    drive.scheduler.admit_only(None)
    drive.run()
    check_outputs(drive)
    assert set(drive.ends) == set(drive.seqs), "a request never ended"
    assert max(drive.worker.tokens_per_step, default=0) <= limits["max_num_batched_tokens"]
    _check_prompt_logprobs(drive)


def _check_prompt_logprobs(drive: Drive) -> None:
    found = {u.seq.key: u.prompt_logprobs for u in drive.updates if u.prompt_logprobs is not None}
    for key, seq in drive.seqs.items():
        if seq.params.prompt_logprobs is None or drive.ends[key] == "cancelled":
            continue
        entries = found[key]
        assert entries[0] is None
        wanted = [logprob_of(p, seq.tokens[p]) for p in range(1, seq.prompt_len)]
        assert [entry.chosen for entry in entries[1:] if entry is not None] == wanted


class _ToldAtOnce(Drive):
    """Its prefix cache learns of every block as soon as its contents are known."""

    def plan(self, records_graph: bool = False) -> StepPlan | None:
        tables = self.scheduler._tables
        for seq in tables._open:
            tables.offer(seq)
        return super().plan(records_graph)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(block_size=st.sampled_from([1, 2, 4]), actions=actions, seed=st.integers(0, 2**16))
@patch.multiple(block_tables, FEW_LATE=2, MOST_LATE=20, AT_ONCE=3)
def test_late_offers_cost_no_hit_on_what_runs(block_size, actions, seed):
    """Prompts go on from what others generate, with room enough that nothing is given up."""
    limits = make_limits(
        vocab_size=3, block_size=block_size, num_blocks=4000, max_num_queued_requests=200
    )
    cached = []
    for kind in (Drive, _ToldAtOnce):
        drive, rng = kind(limits), random.Random(seed)
        for name, action in enumerate(actions):
            if action == "add":
                prompt = [1] * rng.randint(1, 6)
                if drive.seqs and rng.random() < 0.8:
                    other = rng.choice(list(drive.seqs.values())).tokens.tolist()
                    prompt = other[: rng.randint(1, 40)] + prompt[:1]
                drive.add(make_seq(name, prompt, rng.randint(1, 20), seed=rng.randrange(2)))
            elif action != "crash":
                _act(drive, rng, action, name)
        drive.scheduler.admit_only(None)
        drive.run()
        check_outputs(drive)
        cached.append({key: seq.num_cached_tokens for key, seq in drive.seqs.items()})
    assert cached[0] == cached[1]
