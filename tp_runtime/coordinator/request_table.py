"""The requests that are under way, whole: admission, cancel, time limits.

The scheduler knows single samples; a request is all of its samples. Requests that arrive before
the workers are ready are held and admitted then, so a client may connect while a model loads.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol, cast

from tp_runtime.coordinator.inbox import (
    CancelRequest,
    InboxItem,
    MaskReady,
    RequestKey,
    StopSample,
    SubmittedRequest,
)
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, SequenceUpdate
from tp_runtime.errors import (
    OverloadedError,
    RequestTimeoutError,
    TPRuntimeError,
)


class RequestOutlet(Protocol):
    """Where answers about requests go; see `tp_runtime.coordinator.text_threads`."""

    def accepted(self, request: SubmittedRequest) -> None: ...

    def failed(self, key: RequestKey, error: TPRuntimeError) -> None: ...

    def updates(self, updates: list[SequenceUpdate]) -> None: ...


@dataclass
class _Running:
    request: SubmittedRequest
    samples: set[SeqKey] = field(default_factory=set)
    """Those that have not ended."""


class RequestTable:
    """Runs on the engine's thread."""

    def __init__(self, outlet: RequestOutlet, max_held: int) -> None:
        self._outlet = outlet
        self._max_held = max_held
        self._held: dict[RequestKey, SubmittedRequest] = {}
        self._running: dict[RequestKey, _Running] = {}
        self._deadlines: list[tuple[float, RequestKey]] = []
        self._scheduler: Scheduler | None = None

    @property
    def idle(self) -> bool:
        return not self._running and not self._held

    def open(self, scheduler: Scheduler) -> None:
        """The workers are ready for the first time: admit what was held."""
        self._scheduler = scheduler
        held, self._held = self._held, {}
        for request in held.values():
            self._admit(request, scheduler)

    def take(self, item: InboxItem) -> list[SequenceUpdate]:
        """One item of the inbox; returns the updates of what ended with it."""
        if isinstance(item, MaskReady):
            return self._take_mask(item)
        if isinstance(item, SubmittedRequest):
            self._submit(item)
        elif isinstance(item, CancelRequest):
            self._drop(item.key, "cancelled")
        elif isinstance(item, StopSample):
            self._stop(item.key)
        return []

    def _take_mask(self, item: MaskReady) -> list[SequenceUpdate]:
        scheduler = self._scheduler
        if scheduler is None or scheduler.find(item.seq.key) is not item.seq:
            return []
        if isinstance(item.mask, TPRuntimeError):
            self.fail(cast(RequestKey, item.seq.key.request), item.mask)
        elif item.mask is None:
            return scheduler.complete(item.seq)
        else:
            scheduler.allow(item.seq, item.mask)
        return []

    def _submit(self, request: SubmittedRequest) -> None:
        if self._scheduler is not None:
            self._admit(request, self._scheduler)
        elif len(self._held) >= self._max_held:
            error = OverloadedError(
                f"{len(self._held)} requests wait for the model to load; try again later."
            )
            self._outlet.failed(request.key, error)
        else:
            self._held[request.key] = request
            self._watch_deadline(request)

    def _admit(self, request: SubmittedRequest, scheduler: Scheduler) -> None:
        try:
            ended = scheduler.add_all(request.sequences)
        except TPRuntimeError as error:
            self._outlet.failed(request.key, error)
            return
        self._running[request.key] = _Running(request, {seq.key for seq in request.sequences})
        self._watch_deadline(request)
        self._outlet.accepted(request)
        if ended:
            self.ended(ended)
            self._outlet.updates(ended)

    def ended(self, updates: list[SequenceUpdate]) -> None:
        """Forgets the samples that finished in `updates`."""
        for update in updates:
            if update.finish_reason is not None:
                self._forget(update.seq.key)

    def _forget(self, key: SeqKey) -> None:
        request = cast(RequestKey, key.request)
        running = self._running.get(request)
        if running is None:
            return
        running.samples.discard(key)
        if not running.samples:
            del self._running[request]

    def samples(self, key: RequestKey) -> set[SeqKey]:
        """Those of this request that have not ended."""
        running = self._running.get(key)
        return set() if running is None else set(running.samples)

    def fail(self, key: RequestKey, error: TPRuntimeError) -> None:
        """Ends a request with an error, if it still runs."""
        if self._drop(key, "error"):
            self._outlet.failed(key, error)

    def _stop(self, key: SeqKey) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel(key, "stop")
        self._forget(key)

    def _drop(self, key: RequestKey, reason: str) -> bool:
        """False when there is no such request any more."""
        if self._held.pop(key, None) is not None:
            return True
        running = self._running.pop(key, None)
        if running is None:
            return False
        if self._scheduler is not None:
            for sample in running.samples:
                self._scheduler.cancel(sample, reason)
        return True

    # ------------------------------------------------------------ time limits

    def _watch_deadline(self, request: SubmittedRequest) -> None:
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.key))

    def expire(self, now: float) -> None:
        """Fails the requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            running = self._running.get(key)
            request = running.request if running is not None else self._held.get(key)
            if request is None or request.deadline != deadline:
                continue  # ended, or another request of the same name
            self._drop(key, "timeout")
            error = RequestTimeoutError("The request did not finish within its timeout_s.")
            self._outlet.failed(key, error)
