"""Complete a few prompts on the ranks of this torchrun and print them.

    torchrun --nproc-per-node=2 torchrun_examples/offline_generation.py [MODEL]

MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import sys

from tp_runtime import SamplingParams
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The three primary colours are",
]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client:  # from here on rank 0 alone
        outputs = client.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main()
