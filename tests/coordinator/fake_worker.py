"""A worker without a model: a toy network whose output depends on everything a plan can get wrong.

Two "layers" of KV cache. Layer 0 at a position holds (position, id); layer 1 a hash of layer 0 at
all positions up to it, as read back through the row's block table; the sampled id is a hash of
layer 1, read back likewise. As in a real network, all tokens of a step are stored in a layer before
any is read. So a wrong table, slot, position, order, a block shared with another prefix or written
by another row, a skipped or repeated token: each changes the ids that follow. `expected_ids`
computes the same straight from the tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from tp_runtime.messages import (
    Answer,
    Chunk,
    Logprob,
    NewRow,
    RowLogprobs,
    RowSampling,
    StepPlan,
    TokenLogprobs,
    encode,
    pack_ids,
    unpack_ids,
)

_decode = msgspec.msgpack.Decoder(StepPlan).decode


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def _layer1(layer0: list[tuple[int, int]]) -> int:
    return _hash(layer0)


def _draw(
    layer1: list[int],
    sampling: RowSampling,
    position: int,
    vocab_size: int,
    allowed: Collection[int] | None = None,
) -> int:
    """Noise keyed as the real sampler's, blocked ids never drawn, only allowed ones."""
    noise = (sampling.seed, position) if sampling.temperature else ()
    blocked = set(unpack_ids(sampling.blocked_ids)) if position < sampling.min_position else set()
    for attempt in range(1000):
        token_id = _hash(layer1, noise, attempt) % vocab_size
        if token_id not in blocked and (allowed is None or token_id in allowed):
            return token_id
    raise AssertionError("every id is blocked")


def expected_ids(
    prompt: Iterable[int],
    sampling: RowSampling,
    total_len: int,
    end_ids: Iterable[int],
    vocab_size: int,
    allow: Callable[[list[int]], Collection[int] | None] | None = None,
) -> list[int]:
    """What the toy network generates after `prompt`, alone and without a cache. `allow` is a
    grammar: what may follow the generated ids, None for nothing."""
    tokens = list(prompt)
    first = len(tokens)
    layer1 = [_layer1(list(enumerate(tokens[: p + 1]))) for p in range(len(tokens))]
    while len(tokens) < total_len:
        allowed = None
        if allow is not None and (allowed := allow(tokens[first:])) is None:
            break
        tokens.append(_draw(layer1, sampling, len(tokens), vocab_size, allowed))
        layer1.append(_layer1(list(enumerate(tokens))))
        if tokens[-1] in end_ids and len(tokens) > sampling.min_position:
            break
    return tokens[first:]


@dataclasses.dataclass
class Row:
    sampling: RowSampling
    prompt_len: int
    history: list[int]
    table: list[int] = dataclasses.field(default_factory=list)
    position: int = 0
    last_id: int = -1

    def copy(self) -> Row:
        return dataclasses.replace(self, table=list(self.table), history=list(self.history))


_NOTHING = RowSampling(temperature=0.0, seed=0)


class FakeWorker:
    """`not_finite`: ids that, once fed, make the row's logits NaN."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_rows: int,
        generation: int = 0,
        not_finite: Iterable[int] = (),
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.generation = generation
        self.not_finite = frozenset(not_finite)
        self.step = 0
        self.rows: list[Row] = []
        self.tokens_per_step: list[int] = []
        self._masks: dict[int, set[int]] = {}
        self._layer0: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self._layer1: list[int | None] = [None] * (num_blocks * block_size)

    def run(self, plan: StepPlan) -> Answer:
        """Applies a plan as it arrives on the wire."""
        plan = _decode(encode(plan))
        assert (plan.generation, plan.step) == (self.generation, self.step + 1)
        self.step += 1
        self._apply(plan)
        decode = self._decode_rows(plan)
        fed = [(row, row.position, row.last_id) for row in decode]
        for chunk in plan.chunks:
            row = self.rows[chunk.row]
            assert row not in decode, "a row both decodes and prefills"
            fed += [(row, chunk.start + i, t) for i, t in enumerate(unpack_ids(chunk.token_ids))]
        assert fed or plan.records_graph, "an empty step"
        self.tokens_per_step.append(len(fed))
        self._check_writes(fed, {new.row for new in plan.new_rows})
        for row, position, token_id in fed:
            assert 0 <= token_id < self.vocab_size
            self._layer0[self._slot(row, position)] = (position, token_id)
        for row, position, _ in fed:
            slots = [self._slot(row, p) for p in range(position + 1)]
            self._layer1[slots[-1]] = _layer1([self._read(self._layer0, s) for s in slots])
        return self._answer(plan, decode)

    # ------------------------------------------------------------ the delta

    def _apply(self, plan: StepPlan) -> None:
        assert plan.num_rows <= self.max_rows
        moved = [(target, self.rows[source].copy()) for source, target in plan.moves]
        # A row may move past the present ones when another takes its place.
        self.rows += [Row(_NOTHING, 0, []) for _ in range(plan.num_rows - len(self.rows))]
        for target, row in moved:
            self.rows[target] = row
        del self.rows[plan.num_rows :]
        taken = {target for _, target in plan.moves}
        for new in plan.new_rows:
            assert new.row not in taken, "two sequences in one row"
            taken.add(new.row)
            self._enter(new)
        assert len(self.rows) == plan.num_rows
        for entry in plan.blocks:
            assert entry.first == len(self.rows[entry.row].table)
            self.rows[entry.row].table += unpack_ids(entry.blocks)
        pairs = unpack_ids(plan.grown)
        for index, block in zip(pairs[::2], pairs[1::2], strict=True):
            row = self.rows[index]
            assert row.position == len(row.table) * self.block_size, "not the block it feeds"
            row.table.append(block)

    def _enter(self, new: NewRow) -> None:
        row = Row(new.sampling, new.prompt_len, unpack_ids(new.history))
        assert bool(row.history) == new.sampling.has_penalties
        self.rows[new.row] = row

    def _decode_rows(self, plan: StepPlan) -> list[Row]:
        if plan.decode_rows is None:
            numbers = list(range(plan.num_rows))
        else:
            numbers = unpack_ids(plan.decode_rows)
        assert len(set(numbers)) == len(numbers)
        if plan.padded:
            assert plan.padded >= len(numbers)
            assert numbers == list(range(len(numbers))), "a graph runs the first rows"
            assert not plan.chunks
        return [self.rows[n] for n in numbers]

    # ------------------------------------------------------------ the toy network

    def _slot(self, row: Row, position: int) -> int:
        return row.table[position // self.block_size] * self.block_size + position % self.block_size

    @staticmethod
    def _read(layer: list[Any], slot: int) -> Any:
        assert layer[slot] is not None, "a slot is read that nobody wrote"
        return layer[slot]

    def _check_writes(self, fed: list[tuple[Row, int, int]], entered: set[int]) -> None:
        """A block is written while one row has it; others may join in the step that fills it."""
        slots = [self._slot(row, position) for row, position, _ in fed]
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        holders: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            if index not in entered:
                for block in row.table:
                    holders[block] = holders.get(block, 0) + 1
        for slot in slots:
            assert holders.get(slot // self.block_size, 0) <= 1, "a shared block is written"

    def _answer(self, plan: StepPlan, decode: list[Row]) -> Answer:
        ids: list[int] = []
        logprobs: list[RowLogprobs] = []
        self._masks = {id(self.rows[mask.row]): set(unpack_ids(mask.ids)) for mask in plan.masks}
        for row in decode:
            row.position += 1
            self._sample(row, ids, logprobs)
        for index, chunk in enumerate(plan.chunks):
            row = self.rows[chunk.row]
            row.position = chunk.start + len(chunk.token_ids) // 4
            entry = -1 - index
            if chunk.sample:
                entry = len(ids)
                self._sample(row, ids, logprobs)
            if row.sampling.prompt_logprobs >= 0:
                logprobs.append(RowLogprobs(entry, None, [], self._prompt_logprobs(chunk)))
        assert not self._masks, "a mask for a row that samples nothing"
        return Answer(plan.generation, plan.step, pack_ids(ids), logprobs)

    def _sample(self, row: Row, ids: list[int], logprobs: list[RowLogprobs]) -> None:
        slots = [self._slot(row, p) for p in range(row.position)]
        fed = [self._read(self._layer0, s) for s in slots]
        layer1 = [self._read(self._layer1, s) for s in slots]
        allowed = self._masks.pop(id(row), None)
        row.last_id = _draw(layer1, row.sampling, row.position, self.vocab_size, allowed)
        if row.history:  # penalties need every token before this one, and no other
            assert row.history == [token_id for _, token_id in fed]
            row.history.append(row.last_id)
        if row.sampling.logprobs >= 0:
            chosen = logprob_of(row.position, row.last_id)
            logprobs.append(RowLogprobs(len(ids), chosen, [chosen]))
        if any(token_id in self.not_finite for _, token_id in fed):
            ids.append(-1)
        else:
            ids.append(row.last_id)

    def _prompt_logprobs(self, chunk: Chunk) -> list[TokenLogprobs]:
        targets = unpack_ids(chunk.token_ids)[1:] + unpack_ids(chunk.next_id)
        found = [logprob_of(chunk.start + 1 + i, t) for i, t in enumerate(targets)]
        return [TokenLogprobs(chosen, []) for chosen in found]


def logprob_of(position: int, token_id: int) -> Logprob:
    """Stands for the log-probability of `token_id` at `position`."""
    return Logprob(token_id, -float(position), 1)
