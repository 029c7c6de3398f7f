"""Compare this runtime's logits with those of Hugging Face transformers, in float32.

    torchrun --nproc-per-node=2 torchrun_examples/compare_logits_with_transformers.py [MODEL]

For a prompt of random tokens the server returns, at every position, the log-probabilities of the
most likely next tokens (`prompt_logprobs`); transformers computes the same from its logits. Prints
the largest difference and the largest magnitude, and ends with an error when they are too far
apart. MODEL is a folder; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

from tp_runtime import SamplingParams
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

if TYPE_CHECKING:
    from torch import Tensor

LENGTH = 48
TOP = 20
TOLERANCE = 1e-4
"""Of the largest magnitude; float32 sums in another order differ by less."""


def reference_logprobs(model: str, token_ids: list[int]) -> Tensor:
    """log-softmax of transformers' logits, [positions, vocabulary] float32."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([token_ids])).logits[0]
    return logits.float().log_softmax(-1)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model, dtype="float32") as client:  # from here on rank 0 alone
        vocabulary = client.info().vocab_size
        token_ids = random.Random(0).choices(range(vocabulary), k=LENGTH)
        params = SamplingParams(max_tokens=1, prompt_logprobs=TOP)
        output = client.generate([token_ids], params)[0]
        expected = reference_logprobs(model, token_ids)
        largest, difference, compared = 0.0, 0.0, 0
        # Entry i is about token i, which the logits at position i - 1 predict.
        for position, entry in enumerate(output.prompt_logprobs or []):
            for found in [entry.chosen, *entry.top] if entry is not None else []:
                want = float(expected[position - 1, found.token_id])
                largest = max(largest, abs(want))
                difference = max(difference, abs(want - found.logprob))
                compared += 1
        print(
            f"{compared} log-probabilities at {LENGTH - 1} positions: largest difference "
            f"{difference:.2e}, largest magnitude {largest:.2f}"
        )
        if compared < (LENGTH - 1) * TOP or difference > TOLERANCE * largest:
            sys.exit("The runtime and transformers do not agree.")
        print("The runtime and transformers agree.")


if __name__ == "__main__":
    main()
