"""Several clients at once, each with a connection and a conversation of its own.

    torchrun --nproc-per-node=2 torchrun_examples/several_clients.py [MODEL]

The clients are threads here; they may as well be other programs (`Client()` finds the server), or
other machines when the server listens on tcp. What they ask runs in one batch.
MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tp_runtime import Client
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

TOPICS = ["the sea", "mountains", "bread", "trains"]
TOKENS = 24


def converse(address: str, topic: str) -> tuple[str, int]:
    """Two questions, the second about the first answer; the last answer and the tokens of both."""
    with Client(address) as client:
        messages = [{"role": "user", "content": f"Tell me one fact about {topic}."}]
        first = client.chat(messages, temperature=0.7, seed=1, max_tokens=TOKENS)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And one more?"},
        ]
        second = client.chat(messages, temperature=0.7, seed=2, max_tokens=TOKENS)
    return second.text, len(first.token_ids) + len(second.token_ids)


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client:  # from here on rank 0 alone
        address, started = client.address, time.monotonic()
        with ThreadPoolExecutor(len(TOPICS)) as threads:
            answers = list(threads.map(lambda topic: converse(address, topic), TOPICS))
        seconds = time.monotonic() - started
        for topic, (text, _) in zip(TOPICS, answers, strict=True):
            print(f"{topic}: {text!r}")
        tokens = sum(count for _, count in answers)
        print(f"{len(TOPICS)} clients got {tokens} tokens, {tokens / seconds:.1f} tokens/s in all")


if __name__ == "__main__":
    main()
