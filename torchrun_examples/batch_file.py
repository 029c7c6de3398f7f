"""A file of requests in, a file of answers out, one JSON object per line, in the same order.

    torchrun --nproc-per-node=2 torchrun_examples/batch_file.py [MODEL] [INPUT] [OUTPUT]

A line of INPUT has a "prompt" (text) or "messages" (a chat), and any field of SamplingParams:
{"prompt": "Water boils at", "max_tokens": 16, "temperature": 0}. Its line of OUTPUT has "text",
"token_ids" and "finish_reason", or "error" when that request could not run; the others go on.
Without INPUT three lines of this program are used, without OUTPUT the answers are printed.
MODEL is a folder or a name on the Hugging Face hub; without it SmolLM2-135M-Instruct is used.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tp_runtime import Client, RequestOutput, TPRuntimeError
from tp_runtime.launch import session
from tp_runtime.launch.demo_model import demo_model_folder

SAMPLE = """\
{"prompt": "Water boils at", "max_tokens": 16, "temperature": 0}
{"prompt": "Once upon a time", "max_tokens": 16, "seed": 7, "top_p": 0.9}
{"prompt": "This one asks for too much", "temperature": -1}
"""
AT_ONCE = 64
"""Requests under way; the file may be of any length."""


def answer(client: Client, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        ask = client.chat if "messages" in fields else client.generate
        output: RequestOutput = ask(fields.pop("messages", None) or fields.pop("prompt"), **fields)
    except (TPRuntimeError, ValueError, KeyError, TypeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }


def answers(client: Client, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """In the order of the lines, while later ones run."""
    under_way: deque[Future[dict[str, Any]]] = deque()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for line in lines:
            under_way.append(threads.submit(answer, client, line))
            if len(under_way) == AT_ONCE:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else str(demo_model_folder())
    with session(model) as client, ExitStack() as files:  # from here on rank 0 alone
        lines: Iterable[str] = SAMPLE.splitlines()
        if len(sys.argv) > 2:
            lines = files.enter_context(open(sys.argv[2], encoding="utf-8"))
        out = sys.stdout
        if len(sys.argv) > 3:
            out = files.enter_context(open(sys.argv[3], "w", encoding="utf-8"))
        count = failed = 0
        for record in answers(client, filter(str.strip, lines)):
            print(json.dumps(record, ensure_ascii=False), file=out, flush=True)
            count, failed = count + 1, failed + ("error" in record)
        print(f"{count} requests, {failed} of them could not run", file=sys.stderr)


if __name__ == "__main__":
    main()
