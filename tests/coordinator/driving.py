"""Drives a scheduler against the fake worker and collects what each sequence gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, cast
from zlib import crc32

from tests.coordinator.fake_worker import FakeWorker, expected_ids
from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, Sequence, SequenceUpdate, SteadyTokens
from tp_runtime.messages import Answer, StepPlan, pack_ids, unpack_ids
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.grammar import TokenMask

VOCAB = 50


def make_limits(**changes: Any) -> SchedulerLimits:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "run_ahead": 2,
    }
    return SchedulerLimits(**(values | changes))


def make_seq(
    name: object,
    prompt: Iterable[int] | int = (1, 2, 3),
    max_tokens: int | None = 4,
    *,
    sample: int = 0,
    seed: int = 0,
    generated: Iterable[int] = (),
    **params: Any,
) -> Sequence:
    """`prompt` as a number: that many ids, other ones for every name."""
    if isinstance(prompt, int):
        prompt = [(crc32(str(name).encode()) % 13 + 7 * i) % VOCAB for i in range(prompt)]
    sampling = SamplingParams(**({"temperature": 0.0} | params), max_tokens=max_tokens)
    return Sequence(SeqKey(name, sample), prompt, sampling, seed=seed, generated=generated)


def one_by_one(steady: SteadyTokens) -> list[SequenceUpdate]:
    """The same as one update for each token, step after step."""
    columns = [unpack_ids(column) for column in steady.columns]
    assert {len(column) for column in columns} == {steady.num_steps}
    return [
        SequenceUpdate(seq, column[step])
        for step in range(steady.num_steps)
        for seq, column in zip(steady.rows, columns, strict=True)
    ]


class Drive:
    """`outputs[key]` are the ids handed on, `ends[key]` the finish reason."""

    def __init__(self, limits: SchedulerLimits, not_finite: Iterable[int] = ()) -> None:
        self.limits = limits
        self.not_finite = frozenset(not_finite)
        self.scheduler = Scheduler(limits)
        self.worker = self.new_worker(0)
        self.under_way: deque[Answer] = deque()
        self.plans: list[StepPlan] = []
        self.seqs: dict[SeqKey, Sequence] = {}
        self.outputs: dict[SeqKey, list[int]] = {}
        self.ends: dict[SeqKey, str] = {}
        self.updates: list[SequenceUpdate] = []
        self.num_steady = 0
        """Answered steps that went the short way."""

    def new_worker(self, generation: int) -> FakeWorker:
        limits = self.limits
        return FakeWorker(
            limits.num_blocks,
            limits.block_size,
            limits.vocab_size,
            limits.max_num_seqs,
            generation,
            self.not_finite,
        )

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.seqs[seq.key] = seq
            self.outputs[seq.key] = seq.generated_ids
        self._take(self.scheduler.add_all(list(seqs)))

    def plan(self, records_graph: bool = False) -> StepPlan | None:
        """The scheduler's next step, run at once; its answer waits to be committed."""
        plan = self.scheduler.plan(records_graph)
        if plan is not None:
            self.plans.append(plan)
            self.under_way.append(self.worker.run(plan))
        return plan

    def fill_window(self) -> int:
        """Plans until the scheduler wants an answer; the number of steps under way."""
        while self.plan() is not None:
            pass
        return len(self.under_way)

    def commit(self, number: int = 1) -> list[SequenceUpdate]:
        """Takes the answers to the oldest steps, as the engine does."""
        answers = [self.under_way.popleft() for _ in range(number)]
        updates: list[SequenceUpdate] = []
        for piece in self.scheduler.commit_all(answers):
            if isinstance(piece, SteadyTokens):
                self.num_steady += piece.num_steps
                piece = one_by_one(piece)
            updates += piece
        self._take(updates)
        return updates

    def make_masks(self) -> None:
        """As the grammar threads do, for every sequence whose newest token was answered."""
        wanted, self.scheduler.masks_wanted = self.scheduler.masks_wanted, []
        for seq in wanted:
            allowed = toy_grammar(seq.generated_ids)
            if allowed is None:
                self._take(self.scheduler.complete(seq))
            else:
                self.scheduler.allow(seq, TokenMask(ids=pack_ids(allowed)))

    def round(self) -> None:
        self.make_masks()
        self.fill_window()
        if self.under_way:
            self.commit()
        self.scheduler.check_invariants()

    def run(self, most: int = 2000) -> Drive:
        """Until nothing is left; every block must be free then."""
        for _ in range(most):
            if self.scheduler.is_idle:
                break
            self.round()
        assert self.scheduler.is_idle, "the scheduler does not come to an end"
        self.scheduler.check_invariants()
        assert self.scheduler.stats().blocks_used == 0
        return self

    def crash(self) -> None:
        """The workers are lost with everything under way, and replaced."""
        self.under_way.clear()
        self.worker = self.new_worker(self.scheduler.generation + 1)
        self._take(self.scheduler.reset(self.scheduler.generation + 1))

    def _take(self, updates: list[SequenceUpdate]) -> None:
        self.updates += updates
        for update in updates:
            key = update.seq.key
            assert key not in self.ends, "an update after the end"
            if update.token_id >= 0:
                self.outputs[key].append(update.token_id)
            if update.finish_reason is not None:
                self.ends[key] = update.finish_reason


def toy_grammar(generated: list[int]) -> list[int] | None:
    """Ids that may follow: every third, another third after each token; five to ten tokens."""
    count = len(generated)
    if (count >= 5 and sum(generated) % 5 == 0) or count >= 10:
        return None
    return list(range((sum(generated) + count) % 3, VOCAB, 3))


def with_grammar(seq: Sequence) -> Sequence:
    """As a sequence of a request with structured_outputs is handed to the engine."""
    seq.grammar = cast(Any, toy_grammar)
    allowed = toy_grammar(seq.generated_ids)
    assert allowed is not None
    seq.mask = TokenMask(ids=pack_ids(allowed))
    return seq


def alone(seq: Sequence) -> list[int]:
    """What `seq` generates according to the toy network, its limits as they were resolved."""
    assert seq.sampling is not None
    assert seq.prepared_for is not None
    prompt = seq.tokens[: seq.prompt_len].tolist()
    vocab_size = seq.prepared_for.vocab_size
    allow = None if seq.grammar is None else toy_grammar
    return expected_ids(prompt, seq.sampling, seq.total_len, seq.end_ids, vocab_size, allow)


def check_outputs(drive: Drive) -> None:
    """Every sequence that ended by itself got exactly what it would have got alone, a cancelled one
    the beginning of it."""
    for key, seq in drive.seqs.items():
        output, wanted = drive.outputs[key], alone(seq)
        if drive.ends.get(key) in ("stop", "length"):
            assert output == wanted, key
        else:
            assert output == wanted[: len(output)], key
