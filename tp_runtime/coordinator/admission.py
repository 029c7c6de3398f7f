"""What happens to a sequence before it may wait: checks, and parameters made concrete.

`prepare` reads only the sequence and the limits, so it may run in another thread before the
scheduler is given the sequence (ids of a long prompt take milliseconds to check and hash).
"""

from __future__ import annotations

import msgspec

from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.prefix_hash import extend_hashes
from tp_runtime.coordinator.sequence import Sequence, SequenceUpdate
from tp_runtime.errors import InvalidRequestError, RequestFailedError
from tp_runtime.messages import RowSampling, pack_ids
from tp_runtime.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by them would give infinities."""


def prepare(seq: Sequence, limits: SchedulerLimits) -> None:
    """Resolves `total_len`, `end_ids`, `sampling` and `hashes`.

    Raises InvalidRequestError for a request that can never run as asked; the sequence is then of
    no use. Under the same limits again it does nothing, under others it resolves everything
    anew."""
    if seq.prepared_for == limits:
        return
    seq.params.validate()
    _check_ids(seq, limits)
    _check_param_ids(seq.params, limits)
    seq.total_len = _total_len(seq, limits)
    eos = frozenset() if seq.params.ignore_eos else limits.eos_token_ids
    seq.end_ids = eos.union(seq.params.stop_token_ids)
    seq.sampling = resolve_sampling(seq, limits)
    seq.hashes = []
    if limits.enable_prefix_caching:
        extend_hashes(seq.hashes, seq.tokens, limits.block_size)
    seq.prepared_for = limits


def finish_on_arrival(seq: Sequence) -> tuple[str, int | None] | None:
    """(finish reason, stop reason) of a prepared sequence that has nothing to compute: no token
    wanted, or resumed with its last token. None when it must run."""
    if seq.num_generated:
        last = seq.tokens[-1]
        if last in seq.end_ids and seq.num_generated > seq.params.min_tokens:
            return "stop", stop_reason(seq, last)
    if len(seq.tokens) >= seq.total_len and not seq.prompt_logprobs_due:
        return "length", None
    return None


def fit_again(seq: Sequence, limits: SchedulerLimits) -> SequenceUpdate | None:
    """After the workers were replaced, under new limits; None when it goes on."""
    try:
        prepare(seq, limits)
    except InvalidRequestError as error:
        failure = RequestFailedError(f"After the workers were replaced: {error}")
        return SequenceUpdate(seq, finish_reason="error", error=failure)
    end = finish_on_arrival(seq)
    return end and SequenceUpdate(seq, finish_reason=end[0], stop_reason=end[1])


def stop_reason(seq: Sequence, token_id: int) -> int | None:
    """The id when the request named it; None for the model's own end of sequence."""
    return token_id if token_id in seq.params.stop_token_ids else None


def resolve_sampling(seq: Sequence, limits: SchedulerLimits) -> RowSampling:
    """The row's parameters without None and without choices: see RowSampling."""
    params = seq.params
    greedy = params.temperature < GREEDY_BELOW
    min_tokens = params.min_tokens if seq.end_ids else 0
    top_k = 0 if greedy or not 0 < params.top_k < limits.vocab_size else params.top_k
    return RowSampling(
        temperature=0.0 if greedy else params.temperature,
        seed=sample_seed(seq.seed, seq.key.sample),
        top_k=top_k,
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bias_ids=pack_ids(params.logit_bias),
        bias_values=list(params.logit_bias.values()),
        min_position=seq.prompt_len + min_tokens if min_tokens else 0,
        blocked_ids=pack_ids(sorted(seq.end_ids)) if min_tokens else b"",
        logprobs=-1 if params.logprobs is None else params.logprobs,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def row_sampling(seq: Sequence) -> RowSampling:
    """What the worker is told when the sequence enters a row. Prompt logprobs that were delivered
    before a preemption or crash are not computed again."""
    assert seq.sampling is not None, "the scheduler prepares every sequence"
    if seq.sampling.prompt_logprobs >= 0 and not seq.prompt_logprobs_due:
        return msgspec.structs.replace(seq.sampling, prompt_logprobs=-1)
    return seq.sampling


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request: seed + index, wrapped to signed 64 bit."""
    return (seed + index + 2**63) % 2**64 - 2**63


def _check_ids(seq: Sequence, limits: SchedulerLimits) -> None:
    if not seq.prompt_len:
        raise InvalidRequestError("The prompt is empty; it needs at least one token.")
    lowest, highest = min(seq.tokens), max(seq.tokens)
    if lowest < 0 or highest >= limits.vocab_size:
        bad = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"Token id {bad} is not in the vocabulary; this model knows 0 to "
            f"{limits.vocab_size - 1}."
        )


def _check_param_ids(params: SamplingParams, limits: SchedulerLimits) -> None:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(params.logit_bias)),
    ):
        for token_id in ids:
            if not 0 <= token_id < limits.vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {token_id}, which is not in the vocabulary; this model "
                    f"knows 0 to {limits.vocab_size - 1}."
                )


def _total_len(seq: Sequence, limits: SchedulerLimits) -> int:
    wanted = seq.params.max_tokens
    room = 0 if wanted == 0 else 1
    if seq.prompt_len + room > limits.max_model_len:
        raise InvalidRequestError(
            f"The prompt has {seq.prompt_len} tokens, which leaves no room to generate: prompt and "
            f"output together may have {limits.max_model_len}. Shorten the prompt or start the "
            "server with a larger --max-model-len."
        )
    if seq.prompt_len > limits.pool_tokens:
        raise InvalidRequestError(
            f"The prompt has {seq.prompt_len} tokens, more than the {limits.pool_tokens} that the "
            "KV cache holds in all. Shorten the prompt or start the server with more "
            "--num-kv-blocks or a higher --gpu-memory-utilization."
        )
    if wanted is not None and seq.num_generated > wanted:
        raise InvalidRequestError(
            f"The request is resumed with {seq.num_generated} generated tokens; max_tokens is "
            f"{wanted}."
        )
    total = limits.max_total_len
    return total if wanted is None else min(seq.prompt_len + wanted, total)
