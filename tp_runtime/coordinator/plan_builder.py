"""Turns what the scheduler decided into the message for the workers. Decides nothing."""

from __future__ import annotations

from tp_runtime.coordinator.admission import row_sampling
from tp_runtime.coordinator.batch import Batch
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.coordinator.steps_in_flight import PlannedChunk, StepRecord
from tp_runtime.messages import Chunk, NewRow, RowBlocks, RowMask, StepPlan, pack_ids


def build_plan(
    generation: int,
    record: StepRecord,
    batch: Batch,
    entering: list[Sequence],
    moves: list[tuple[int, int]],
    check: bool,
) -> StepPlan:
    """`batch` is settled and holds the rows of this step. A steady step has no parts at all, or
    `grown` alone."""
    plan = StepPlan(generation, record.step, len(batch), batch.padded, batch.decode_rows)
    if record.grown:
        plan.grown = pack_ids([n for seq in record.grown for n in (seq.row, seq.blocks[-1])])
    if record.chunks:
        plan.chunks = [_chunk(chunk) for chunk in record.chunks]
    if entering:
        plan.new_rows = [_new_row(seq) for seq in entering]
        plan.blocks = [RowBlocks(seq.row, 0, pack_ids(seq.blocks)) for seq in entering]
    if record.with_grammar:
        plan.masks = [_mask(seq) for seq in record.with_grammar]
    plan.moves = moves
    plan.check = check
    plan.records_graph = record.records_graph
    return plan


def _chunk(chunk: PlannedChunk) -> Chunk:
    seq = chunk.seq
    next_id = b""
    if seq.prompt_logprobs_due and not chunk.last:
        next_id = seq.tokens[chunk.stop : chunk.stop + 1].tobytes()
    ids = seq.tokens[chunk.start : chunk.stop].tobytes()
    return Chunk(seq.row, chunk.start, ids, chunk.sample, next_id)


def _mask(seq: Sequence) -> RowMask:
    assert seq.mask is not None, "a row with a grammar is sampled only when its mask is known"
    return RowMask(seq.row, *seq.mask)


def _new_row(seq: Sequence) -> NewRow:
    sampling = row_sampling(seq)
    history = seq.tokens.tobytes() if sampling.has_penalties else b""
    return NewRow(seq.row, sampling, seq.prompt_len, history)
