"""One sample's tokens on their way to its client: text, stop strings, deltas.

No threads and no sockets: `add` takes what the scheduler says, `delta` gives what is new for the
client. The same tokens give the same text in whatever portions they come, so a resumed sample goes
on exactly where its client left off.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence as SequenceOf

from tp_runtime.coordinator.sequence import SequenceUpdate
from tp_runtime.messages import SampleDelta, TokenLogprobs, pack_ids, unpack_ids
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.detokenizer import Detokenizer
from tp_runtime.text.stop_strings import StopMatch, StopStrings

pack_id = struct.Struct("<i").pack
"""As `pack_ids` with one id, at a quarter of the cost."""
_unpack_id = struct.Struct("<i").unpack


class SampleText:
    """`detokenizer=None`: no text, and stop strings are not looked for. `flush_s`: least time
    between two deltas in seconds; infinity: one delta at the end."""

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        flush_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.num_tokens = 0
        """Generated tokens up to now, or up to the stop string once it was found."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._detokenizer = detokenizer
        self._stops: StopStrings | None = None
        if params.stop and detokenizer is not None:
            self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._show_end_id = params.include_stop_str_in_output
        self._flush_s = flush_s
        self._flushed = -math.inf
        self._ids: list[int] = []
        self._undecoded: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._timings: tuple[int, float, float] | None = None
        self._plain = False
        """Whether `next_delta` may be used: since the last delta nothing was held for later."""

    def resume(self, token_ids: SequenceOf[int], text_sent: int) -> None:
        """The client has these ids and the first `text_sent` characters of their text. A stop
        string that they complete ends the sample here and now."""
        for token_id in token_ids:
            self._take(token_id)
            if self.finish_reason is not None:
                break
        self._decode()
        self._text = ["".join(self._text)[text_sent:]]

    def add(self, update: SequenceUpdate) -> bool:
        """Takes one update of the scheduler; True when the sample ended with it."""
        reason = update.finish_reason
        self._plain = False
        if update.token_id >= 0:
            self._ids.append(update.token_id)
            if update.logprobs is not None:
                self._logprobs.append(update.logprobs)
            if reason == "stop" and not self._show_end_id:
                self.num_tokens += 1  # the id that ended it is a token and not text
            else:
                self._take(update.token_id)
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        if reason is not None and self.finish_reason is None:
            self._finish(reason, update.stop_reason)
        return self.finish_reason is not None

    def end(self, reason: str) -> None:
        """The sample is over without another token: all that it may become has been resumed."""
        if self.finish_reason is None:
            self._finish(reason, None)

    def next_delta(self, token_ids: bytes) -> SampleDelta | None:
        """The delta of further tokens (packed) when nothing else is to be said: no end, no
        logprobs, no stop strings, not the first token, nothing held for later. None: use `add`.

        Almost every token goes this way, so it is short."""
        if not self._plain:
            return None
        self.num_tokens += len(token_ids) >> 2
        detokenizer = self._detokenizer
        if detokenizer is None:
            text = ""
        elif len(token_ids) == 4:
            text = detokenizer.push_one(_unpack_id(token_ids)[0])
        else:
            text = detokenizer.push(unpack_ids(token_ids))
        return SampleDelta(self.request_id, self.index, token_ids, text)

    def set_timings(self, num_cached_tokens: int, queue_s: float, first_token_s: float) -> None:
        """Told to the client once, with its next delta."""
        self._timings = (num_cached_tokens, queue_s, first_token_s)

    def due(self, now: float) -> bool:
        """Whether the client should hear of what is new; `now` is `time.monotonic()`."""
        if self.finish_reason is not None:
            return True
        return now >= self._flushed + self._flush_s  # -inf + inf, for never, compares false

    def delta(self, now: float) -> SampleDelta:
        """Everything new since the last one; `now` as in `due`."""
        self._flushed = now
        self._decode()
        cached, queue_s, first_token_s = self._timings or (0, 0.0, 0.0)
        delta = SampleDelta(
            self.request_id,
            self.index,
            pack_ids(self._ids),
            "".join(self._text),
            self.finish_reason,
            self.stop_reason,
            self._logprobs or None,
            self._prompt_logprobs,
            cached,
            queue_s,
            first_token_s,
        )
        self._ids, self._text, self._logprobs = [], [], []
        self._prompt_logprobs = self._timings = None
        self._plain = self._stops is None and self._flush_s <= 0.0
        return delta

    def _take(self, token_id: int) -> None:
        """Without stop strings, text can wait until somebody wants it."""
        self.num_tokens += 1
        if self._stops is None:
            self._undecoded.append(token_id)
        elif self._detokenizer is not None:
            self._show(self._detokenizer.push_one(token_id))

    def _show(self, text: str) -> None:
        if self._stops is None:
            self._text.append(text)
            return
        shown = self._stops.push(text, self.num_tokens > self._min_tokens)
        if isinstance(shown, StopMatch):
            self.finish_reason, self.stop_reason = "stop", shown.stop
            shown = shown.text
        self._text.append(shown)

    def _decode(self) -> None:
        if self._undecoded and self._detokenizer is not None:
            self._text.append(self._detokenizer.push(self._undecoded))
        self._undecoded = []

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        self._decode()
        if self._detokenizer is not None:
            self._show(self._detokenizer.finish())
        if self.finish_reason is None:  # the last characters were no stop string either
            if self._stops is not None:
                self._text.append(self._stops.finish())
            self.finish_reason, self.stop_reason = reason, stop_reason
