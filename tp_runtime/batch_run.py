"""Many prompts at once: keeping the server busy, collecting in order, showing how far it is."""

from __future__ import annotations

import concurrent.futures
import sys
import time
from typing import Any

from tp_runtime.client_calls import GenerateCall
from tp_runtime.client_requests import MAX_IN_FLIGHT, Batch, RequestMaker
from tp_runtime.outputs import RequestOutput

_TURN_S = 0.1


def run_batch(
    requests: RequestMaker, batch: Batch, show_progress: bool | None = None
) -> list[RequestOutput]:
    """The outputs in the order of the prompts; the first error of one cancels the others.

    `show_progress` None: for several prompts, when stderr is a terminal."""
    if show_progress is None:
        show_progress = len(batch.messages) > 1 and sys.stderr.isatty()
    run = _BatchRun(requests, batch)
    try:
        with _ProgressBar(len(batch.messages), hidden=not show_progress) as bar:
            while not run.advance(_TURN_S):
                bar.update(run.calls, run.done)
            bar.update(run.calls, run.done)
    except BaseException:  # Ctrl-C too
        run.cancel()
        raise
    return [call.future.result() for call in run.calls]


class _BatchRun:
    def __init__(self, requests: RequestMaker, batch: Batch) -> None:
        self._requests = requests
        self._messages = batch.messages
        self.calls: list[GenerateCall] = []
        self.done = 0

    def advance(self, timeout_s: float) -> bool:
        """Send what may be sent and wait a moment for the oldest that runs; True at the end.

        Raises the error of a request that failed."""
        while len(self.calls) < min(self.done + MAX_IN_FLIGHT, len(self._messages)):
            index = len(self.calls)
            self.calls.append(self._requests.begin(self._messages[index], index, None))
        oldest = next((call for call in self.calls if not call.future.done()), None)
        if oldest is not None:
            concurrent.futures.wait([oldest.future], timeout_s)
        ended = [call for call in self.calls if call.future.done()]
        for call in ended:
            error = call.future.exception()
            if error is not None:
                raise error
        self.done = len(ended)
        return self.done == len(self._messages)

    def cancel(self) -> None:
        for call in self.calls:
            if not call.future.done():
                self._requests.connection.cancel(call.request_id)


class _ProgressBar:
    """Prompts done, and tokens per second since the start: prompt tokens of requests that have
    begun to answer, and generated tokens."""

    def __init__(self, total: int, *, hidden: bool) -> None:
        self._bar: Any = None
        self._started = time.monotonic()
        if not hidden:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="prompt", dynamic_ncols=True, file=sys.stderr)

    def update(self, calls: list[GenerateCall], done: int) -> None:
        if self._bar is None:
            return
        seconds = max(time.monotonic() - self._started, 1e-6)
        decoded = sum(call.num_tokens for call in calls)
        prefilled = sum(call.num_prompt_tokens for call in calls if call.num_tokens)
        self._bar.set_postfix_str(
            f"prefill {prefilled / seconds:.0f} tok/s, decode {decoded / seconds:.0f} tok/s",
            refresh=False,
        )
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()
