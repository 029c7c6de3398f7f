"""Stream two answers at the same time and print their pieces as they come.

    torchrun --nproc-per-node=2 torchrun_examples/streaming_client.py [MODEL]

MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import sys
import time

from tp_runtime import SamplingParams
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

PROMPTS = ["Once upon a time there was", "A short list of fruits:"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client:  # from here on rank 0 alone
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=32)
        started, tokens = time.monotonic(), 0
        for chunk in client.generate(PROMPTS, params, stream=True):
            tokens += len(chunk.token_ids)
            print(f"[{chunk.prompt_index}] {chunk.text!r}", flush=True)
        seconds = time.monotonic() - started
        print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    main()
