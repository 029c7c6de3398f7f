"""What a client gets back: finished outputs and the pieces of a stream. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from tp_runtime.messages import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    `finish_reason`: "stop" (end id or stop string; `stop_reason` is the stop string or the entry
    of `stop_token_ids`, None for the model's own end id), "length", or None while it runs.
    `text` has neither the end id nor, unless asked for, the stop string; `token_ids` have both.
    `logprobs`: one entry per token id, None unless asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Timings:
    """Seconds. `queue_s`: from arrival at the server to the first computation; `first_token_s`:
    from arrival to the first token, both of the sample that came first; `total_s`: as the client
    saw it, from the call to the last token."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A finished request: `outputs` has one entry per sample, in order.

    `seed` is the one that was used: the same parameters with it give the same tokens again.
    `prompt_logprobs`: one entry per prompt token, the first None; None unless asked for.
    `prompt` is None for a prompt given as ids or messages. `num_cached_tokens`: prompt tokens whose
    K and V were found in the prefix cache."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    seed: int | None = None
    num_cached_tokens: int = 0
    timings: Timings = field(default_factory=Timings)

    def echo(self, index: int = 0) -> str:
        """The prompt's text and a sample's, as OpenAI's `echo` gives them; with `max_tokens=0` the
        prompt alone. The log-probabilities of both are `prompt_logprobs` and the sample's own.

        Raises ValueError for a prompt that was not text; `Client.detokenize` gives that of ids."""
        if self.prompt is None:
            raise ValueError(
                "This prompt was given as ids or messages and has no text of its own; "
                "client.detokenize(output.prompt_token_ids) gives one."
            )
        return self.prompt + self.outputs[index].text

    @property
    def text(self) -> str:
        """Of the first sample, like the properties that follow."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs


@dataclass(slots=True)
class StreamChunk:
    """What is new of one sample: `text` is valid Unicode and may be empty (a character or a
    possible stop string is not complete yet). `prompt_index` and `index` say which prompt of the
    call and which sample of it this is; the last chunk of a sample has a `finish_reason`."""

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
