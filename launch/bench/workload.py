"""The throughput workload: that of nano-vllm's benchmark, so that figures can be compared."""

from __future__ import annotations

import random
from typing import NamedTuple

from tp_runtime.errors import ConfigError
from tp_runtime.sampling_params import SamplingParams

NUM_PROMPTS = 256
GENERATED_TOKENS = 133_966
"""Of the whole workload; every request ignores the end id."""
MAX_MODEL_LEN = 4096
_SHORTEST, _LONGEST = 100, 1024
_LARGEST_ID = 10_000


class Workload(NamedTuple):
    """Prompts of random ids, and how many tokens each is to give."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def generated_tokens(self) -> int:
        return sum(self.max_tokens)

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in self.max_tokens
        ]

    def first(self, count: int) -> Workload:
        return Workload(self.prompts[:count], self.max_tokens[:count])


def make_workload() -> Workload:
    """The order of the draws matters: all prompts first, then all lengths, from seed 0."""
    draw = random.Random(0).randint
    prompts = [
        [draw(0, _LARGEST_ID) for _ in range(draw(_SHORTEST, _LONGEST))] for _ in range(NUM_PROMPTS)
    ]
    return Workload(prompts, [draw(_SHORTEST, _LONGEST) for _ in range(NUM_PROMPTS)])


def check_vocabulary(vocab_size: int) -> None:
    """Raises ConfigError when the model does not know every id of the workload."""
    if vocab_size <= _LARGEST_ID:
        raise ConfigError(
            f"The workload uses ids up to {_LARGEST_ID}; this model's vocabulary has {vocab_size}."
        )
