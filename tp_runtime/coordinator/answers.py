"""Reads an answer: whose tokens these are, and who ends with them.

Knows the plan's record and the sequences, not rows, blocks or the queue. Answers that bring one
more token to the same rows and mean nothing else are taken together, whole columns at a time. Any
other costs one pass over the ids; only an id that could mean something (an end id of any running
sequence, -1), logprobs, or sequences that ended meanwhile lead to the pass that looks closely.
"""

from __future__ import annotations

from collections.abc import Iterable

from tp_runtime.coordinator.admission import stop_reason
from tp_runtime.coordinator.packed_ids import all_below, columns
from tp_runtime.coordinator.sequence import (
    Sequence,
    SequenceState,
    SequenceUpdate,
    SteadyTokens,
)
from tp_runtime.coordinator.steps_in_flight import StepRecord
from tp_runtime.coordinator.watched_ids import NOT_FINITE, WatchedIds
from tp_runtime.errors import RequestFailedError, WorkerFailedError
from tp_runtime.messages import Answer, RowLogprobs, TokenLogprobs, unpack_ids


def check_answer(
    answer: Answer, record: StepRecord | None, generation: int, vocab_size: int
) -> list[int]:
    """The answer's ids. Raises WorkerFailedError when it is not the answer to `record`: after that
    nothing that the workers say can be trusted."""
    if record is None or (answer.generation, answer.step) != (generation, record.step):
        due = "no answer" if record is None else f"that of step {generation}.{record.step}"
        raise WorkerFailedError(
            f"The workers answered step {answer.generation}.{answer.step} where {due} was due."
        )
    ids = unpack_ids(answer.token_ids)
    if len(ids) != len(record.sampled):
        raise WorkerFailedError(
            f"The answer to step {record.step} has {len(ids)} token ids; "
            f"{len(record.sampled)} rows were to be sampled."
        )
    if not all_below(answer.token_ids, vocab_size):
        _check_range(ids, record.step, vocab_size)
    return ids


def count_steady(
    answers: Iterable[Answer],
    records: Iterable[StepRecord],
    generation: int,
    vocab_size: int,
    watched: WatchedIds,
) -> int:
    """How many of the first answers bring one more token to each of the same rows, all of which go
    on, and nothing else. Nothing is raised: what is not as it should be is not steady."""
    count, rows = 0, None
    for answer, record in zip(answers, records, strict=False):
        if not record.is_steady or (rows is not None and record.sampled is not rows):
            break
        rows = record.sampled
        due = (generation, record.step) == (answer.generation, answer.step)
        if not due or answer.logprobs or len(answer.token_ids) != 4 * len(rows):
            break
        ids = answer.token_ids
        if not all_below(ids, vocab_size) or watched.maybe_in(ids):
            break
        count += 1
    return count


def take_steady(answers: list[Answer], rows: tuple[Sequence, ...]) -> SteadyTokens:
    """Appends the ids of all these answers, which `count_steady` has counted."""
    new = columns([answer.token_ids for answer in answers])
    for seq, column in zip(rows, new, strict=True):
        seq.tokens.frombytes(column)
    return SteadyTokens(rows, new, len(answers))


def _check_range(ids: list[int], step: int, vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size or token_id < NOT_FINITE:
            raise WorkerFailedError(
                f"The answer to step {step} holds token id {token_id}; the vocabulary has "
                f"{vocab_size}."
            )


def read_answer(
    answer: Answer, ids: list[int], record: StepRecord, watched: WatchedIds, late: bool
) -> list[SequenceUpdate]:
    """Appends the ids to their sequences. One update for each sequence that still runs; states are
    not changed here, the caller acts on finish reasons.

    `late`: sequences may have ended while this step was under way; their ids are dropped."""
    sampled = record.sampled
    if not (late or answer.logprobs or _wants_prompt_logprobs(record)) and (
        watched.ids.isdisjoint(ids)
    ):
        for seq, token_id in zip(sampled, ids, strict=True):
            seq.tokens.append(token_id)
        updates = list(map(SequenceUpdate, sampled, ids))
    else:
        _collect_prompt_logprobs(answer, record)
        logprobs = _chosen_logprobs(answer)
        updates = [
            _read_token(seq, token_id, logprobs.get(i))
            for i, (seq, token_id) in enumerate(zip(sampled, ids, strict=True))
            if seq.state is not SequenceState.FINISHED
        ]
    if record.ending:
        _end_by_length(record, updates)
    return updates


def _wants_prompt_logprobs(record: StepRecord) -> bool:
    return any(chunk.seq.prompt_logprobs_due for chunk in record.chunks)


def _read_token(seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceUpdate:
    if token_id == NOT_FINITE:
        error = RequestFailedError(
            f"The model's logits at position {len(seq.tokens)} are not finite (NaN or infinity), "
            "so no token can be chosen. The weights or the dtype do not bear this input."
        )
        return SequenceUpdate(seq, finish_reason="error", error=error)
    seq.tokens.append(token_id)
    update = SequenceUpdate(seq, token_id, logprobs=logprobs)
    if token_id in seq.end_ids and seq.num_generated > seq.params.min_tokens:
        update.finish_reason = "stop"
        update.stop_reason = stop_reason(seq, token_id)
    if seq.prompt_logprobs_due:
        _deliver_prompt_logprobs(update)
    return update


def _end_by_length(record: StepRecord, updates: list[SequenceUpdate]) -> None:
    found = {update.seq: update for update in updates if update.seq.row < 0}  # without a row: few
    for seq in record.ending:
        if seq.state is SequenceState.FINISHED:
            continue
        update = found.get(seq)
        if update is None:  # no token was wanted of it
            update = SequenceUpdate(seq)
            _deliver_prompt_logprobs(update)
            updates.append(update)
        if update.finish_reason is None:
            update.finish_reason = "length"


def _chosen_logprobs(answer: Answer) -> dict[int, TokenLogprobs]:
    return {
        entry.i: TokenLogprobs(entry.chosen, entry.top)
        for entry in answer.logprobs
        if entry.chosen is not None
    }


def _collect_prompt_logprobs(answer: Answer, record: StepRecord) -> None:
    """Chunks come in order, so what they say of the prompt is simply appended.

    Raises before any token is taken: a token that a sequence has and nobody was told of would be
    lost to its client."""
    for entry in answer.logprobs:
        if entry.prompt:
            seq = _chunk_owner(entry, record)
            if seq.prompt_logprobs_due:
                seq.prompt_logprobs += entry.prompt
    for chunk in record.chunks:
        seq = chunk.seq
        if chunk.last and seq.prompt_logprobs_due and seq.is_alive:
            given = len(seq.prompt_logprobs)
            if given != seq.prompt_len:
                raise WorkerFailedError(
                    f"The workers answered {given - 1} prompt logprobs for a prompt of "
                    f"{seq.prompt_len} tokens."
                )


def _chunk_owner(entry: RowLogprobs, record: StepRecord) -> Sequence:
    if 0 <= entry.i < len(record.sampled):
        return record.sampled[entry.i]
    if 0 <= -1 - entry.i < len(record.chunks):
        return record.chunks[-1 - entry.i].seq
    raise WorkerFailedError(
        f"The answer to step {record.step} has logprobs of entry {entry.i}, which is not in it."
    )


def _deliver_prompt_logprobs(update: SequenceUpdate) -> None:
    seq = update.seq
    update.prompt_logprobs = seq.prompt_logprobs
    seq.prompt_logprobs = []
    seq.prompt_logprobs_due = False
