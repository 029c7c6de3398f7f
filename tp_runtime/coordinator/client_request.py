"""One Generate message on its way through the coordinator, from arrival to its last delta.

Shared by the front end (which may cancel it), the tokenization pool (which submits it) and the
output thread (which ends it). Knows nothing of sockets or tokens.
"""

from __future__ import annotations

import threading
import time

from tp_runtime.coordinator.inbox import RequestKey
from tp_runtime.coordinator.sample_text import SampleText
from tp_runtime.coordinator.sequence import Sequence
from tp_runtime.errors import InvalidRequestError
from tp_runtime.messages import Generate


class ClientRequest:
    """`lock` orders cancellation against submission: whoever takes it first decides."""

    __slots__ = (
        "arrival",
        "cancelled",
        "key",
        "lock",
        "message",
        "num_prompt_tokens",
        "prompt_ids",
        "samples",
        "seed",
    )

    def __init__(self, client: bytes, message: Generate, drawn_seed: int) -> None:
        self.key = RequestKey(client, message.request_id)
        self.message = message
        self.arrival = time.monotonic()
        self.seed = drawn_seed if message.params.seed is None else message.params.seed
        self.lock = threading.Lock()
        self.cancelled = False
        self.num_prompt_tokens = 0
        self.prompt_ids = b""
        """Packed, when the prompt came as text or messages: the client needs them to resume."""
        self.samples: dict[Sequence, SampleText] = {}
        """Samples that have not ended."""

    @property
    def deadline(self) -> float | None:
        timeout = self.message.timeout_s
        return None if timeout is None else self.arrival + timeout


def check_message(message: Generate) -> None:
    """What can be said without tokenizer, model or scheduler; raises InvalidRequestError."""
    message.params.validate()
    prompts = (message.prompt, message.prompt_token_ids, message.messages)
    given = sum(prompt is not None for prompt in prompts)
    if given != 1:
        raise InvalidRequestError(
            f"Exactly one of prompt, prompt_token_ids and messages must be given, not {given}."
        )
    if message.params.stop and not message.detokenize:
        raise InvalidRequestError(
            "stop strings are found in text; they cannot be used with detokenize=False. Use "
            "stop_token_ids."
        )
    if message.timeout_s is not None and not message.timeout_s > 0:
        raise InvalidRequestError(f"timeout_s={message.timeout_s!r} must be greater than 0.")
    indices = [resume.index for resume in message.resume]
    if len(set(indices)) != len(indices) or any(not 0 <= i < message.params.n for i in indices):
        raise InvalidRequestError(
            f"resume names the samples {indices}; they must differ and be in 0 to n - 1 "
            f"(n={message.params.n})."
        )
