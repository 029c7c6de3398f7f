"""Is what is about to be timed right? Greedy tokens beside those of the eager reference.

The reference is a second server on the same weights: no CUDA graphs, the PyTorch attention,
sampling from gathered logits. In float arithmetic two tokens may be as good as equal, so they may
differ where the reference itself has them within `tolerance` of each other, a *near tie*; what
follows in that sequence has another context and is not compared. The log-probability of every
token compared must agree to the same tolerance, so that flat logits cannot hide a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import RequestFailedError
from tp_runtime.launch.bench.target import llm_arguments
from tp_runtime.llm import LLM
from tp_runtime.outputs import RequestOutput
from tp_runtime.sampling_params import SamplingParams

TOKENS = 16
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Of log-probabilities, natural logarithm: what rounding in another order may change."""
_ALTERNATIVES = 5


class Comparison(NamedTuple):
    """Tokens looked at, sequences that left the reference at a near tie, the largest difference of
    a log-probability."""

    compared: int
    near_ties: int
    largest: float


def check_against_reference(
    config: EngineConfig, prompts: list[list[int]], dtype: str, **changes: object
) -> Comparison:
    """Starts both servers, one after the other. `changes` are settings of both.

    Raises RequestFailedError that says where they differ."""
    mine = _greedy(llm_arguments(config, **changes), prompts)
    reference = _greedy(
        llm_arguments(
            config,
            **changes,
            enforce_eager=True,
            attention_backend="reference",
            sampling="gather",
        ),
        prompts,
    )
    return compare(mine, reference, TOLERANCE[dtype])


def _greedy(arguments: dict[str, object], prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=_ALTERNATIVES
    )
    with LLM(**arguments) as llm:  # type: ignore[arg-type]
        return llm.generate(
            prompt_token_ids=prompts, sampling_params=params, detokenize=False, use_tqdm=False
        )


def compare(
    mine: Sequence[RequestOutput], reference: Sequence[RequestOutput], tolerance: float
) -> Comparison:
    """Outputs with logprobs. Raises RequestFailedError."""
    compared = near_ties = 0
    largest = 0.0
    for number, (one, other) in enumerate(zip(mine, reference, strict=True)):
        for at, (mine_at, reference_at) in enumerate(
            zip(one.logprobs or [], other.logprobs or [], strict=True)
        ):
            known = {entry.token_id: entry.logprob for entry in reference_at.top}
            known[reference_at.chosen.token_id] = reference_at.chosen.logprob
            token = mine_at.chosen.token_id
            gap = reference_at.chosen.logprob - known.get(token, -float("inf"))
            off = abs(mine_at.chosen.logprob - known.get(token, float("inf")))
            if gap > tolerance or off > tolerance:
                raise RequestFailedError(
                    f"Prompt {number}, token {at}: {token} with log-probability "
                    f"{mine_at.chosen.logprob:.4f}; the eager reference has "
                    f"{reference_at.chosen.token_id} with {reference_at.chosen.logprob:.4f} "
                    f"(tolerance {tolerance:g}). No figures: what would be timed is not right."
                )
            compared += 1
            largest = max(largest, off)
            if token != reference_at.chosen.token_id:
                near_ties += 1
                break
    return Comparison(compared, near_ties, largest)
