"""How likely the model finds a text, and what it would have said instead.

    torchrun --nproc-per-node=2 torchrun_examples/logprobs.py [MODEL]

`prompt_logprobs` scores a given text: its perplexity, and the least expected token of it;
`logprobs` tells the alternatives beside each generated token. Both are natural logarithms.
MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import math
import sys

from tp_runtime import Client, SamplingParams
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

TEXTS = ["The sun rises in the east.", "The sun rises in the wardrobe."]
PROMPT = "The capital of France is"


def score(client: Client, text: str) -> None:
    output = client.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0))
    # The first token has none: nothing stands before it.
    scored = [entry.chosen for entry in output.prompt_logprobs or [] if entry is not None]
    perplexity = math.exp(-sum(token.logprob for token in scored) / len(scored))
    least = min(scored, key=lambda token: token.logprob)
    print(
        f"{text!r}: perplexity {perplexity:.1f}; least expected was "
        f"{client.detokenize([least.token_id])!r} (rank {least.rank})"
    )


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client:  # from here on rank 0 alone
        for text in TEXTS:
            score(client, text)
        output = client.generate(PROMPT, temperature=0.0, max_tokens=6, logprobs=3)
        print(f"{PROMPT!r} ->")
        for entry in output.logprobs or []:
            top = ", ".join(
                f"{client.detokenize([token.token_id])!r} {math.exp(token.logprob):.0%}"
                for token in entry.top
            )
            print(f"  {client.detokenize([entry.chosen.token_id])!r:>12}   of   {top}")


if __name__ == "__main__":
    main()
