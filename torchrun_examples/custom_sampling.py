"""How a token is chosen: every request of a batch may be sampled in its own way.

    torchrun --nproc-per-node=2 torchrun_examples/custom_sampling.py [MODEL]

With a seed the same draws come again, alone or in a batch, at any number of ranks.
MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import sys

from tp_runtime import SamplingParams
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

PROMPT = "My favourite colour is"
TOKENS = 12

WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=TOKENS),
    "nucleus": SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=TOKENS),
    "one of the 5 best": SamplingParams(top_k=5, seed=7, max_tokens=TOKENS),
    "not unlikely": SamplingParams(temperature=1.5, min_p=0.1, seed=7, max_tokens=TOKENS),
    "without repeating": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=TOKENS
    ),
    "until a full stop": SamplingParams(
        temperature=0.0, stop=["."], include_stop_str_in_output=True, max_tokens=TOKENS
    ),
    "at least 8 tokens": SamplingParams(min_tokens=8, seed=3, max_tokens=TOKENS),
}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client:  # from here on rank 0 alone
        outputs = client.generate([PROMPT] * len(WAYS), list(WAYS.values()))
        for name, output in zip(WAYS, outputs, strict=True):
            print(f"{name:>20}: {output.text!r}")

        greedy = outputs[0].token_ids[0]
        without = client.generate(
            PROMPT, temperature=0.0, max_tokens=TOKENS, logit_bias={greedy: -100.0}
        )
        print(f"{'without its first':>20}: {without.text!r}")

        three = client.generate(PROMPT, n=3, temperature=1.0, max_tokens=TOKENS)
        for sample in three.outputs:
            print(f"{f'sample {sample.index} of 3':>20}: {sample.text!r}")

        # A seed that was not given was drawn by the server and comes back with the output.
        again = client.generate(PROMPT, n=3, temperature=1.0, max_tokens=TOKENS, seed=three.seed)
        same = [sample.token_ids for sample in again.outputs] == [
            sample.token_ids for sample in three.outputs
        ]
        print(f"seed {three.seed} gives the same three again: {same}")


if __name__ == "__main__":
    main()
