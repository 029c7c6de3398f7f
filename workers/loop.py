"""The loop of a ready worker: plan in, step, answer out.

While steps are on the device the loop looks for the next plan and for finished answers in turn, so
the next step is launched before the previous one is answered. With nothing under way it sleeps in
the kernel on the ring's doorbell.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from tp_runtime.errors import ProtocolError
from tp_runtime.messages import Answer, StepPlan, Stop, encode
from tp_runtime.transport.heartbeat import Phase
from tp_runtime.transport.ring import RingReader, RingWriter
from tp_runtime.workers.runner import Runner, StepResult
from tp_runtime.workers.step_trace import StepTrace

IDLE_BEAT_S = 0.5
"""An idle worker wakes this often to show that it lives."""
SPIN_S = 0.0001
"""Looking for the next plan before sleeping: about the time the coordinator takes to form one."""

_decode = msgspec.msgpack.Decoder(StepPlan | Stop).decode


class WorkerLoop:
    """`answers` is None on every rank but 0. `enter(phase, step)` writes the heartbeat; `trace`
    is given under `--trace`."""

    def __init__(
        self,
        runner: Runner,
        plans: RingReader,
        answers: RingWriter | None,
        generation: int,
        enter: Callable[[Phase, int], None],
        trace: StepTrace | None = None,
    ) -> None:
        self._runner = runner
        self._plans = plans
        self._answers = answers
        self._generation = generation
        self._enter = enter
        self._trace = trace
        self._step = 0
        self._under_way: deque[tuple[StepResult, int]] = deque()
        """Results and the times at which their plans arrived, nanoseconds."""

    def run(self) -> None:
        """Returns on Stop, with every step answered."""
        self._enter(Phase.IDLE, 0)
        while True:
            message = self._next()
            received = time.monotonic_ns()
            plan = _decode(message)
            self._check(plan)
            if isinstance(plan, Stop):
                while self._under_way:
                    self._answer_oldest()
                if self._trace is not None:
                    self._trace.finish()
                return
            self._enter(Phase.RUN, plan.step)
            if self._trace is not None:
                self._trace.before_step(plan.step)
            result = self._runner.step(plan)
            if self._trace is not None:
                self._trace.after_step(received, self._runner.applied_at)
            if self._answers is not None:
                self._under_way.append((result, received))
                self._answer_ready()
            else:
                self._enter(Phase.IDLE, plan.step)

    def _next(self) -> bytes:
        while self._under_way:
            if (message := self._plans.try_read()) is not None:
                return message
            self._answer_ready()
        while True:
            message = self._plans.read(timeout_s=IDLE_BEAT_S, spin_s=SPIN_S)
            if message is not None:
                return message
            self._enter(Phase.IDLE, self._step)

    def _check(self, plan: StepPlan | Stop) -> None:
        if plan.generation != self._generation or plan.step != self._step + 1:
            raise ProtocolError(
                f"Plan {plan.generation}.{plan.step} arrived where {self._generation}."
                f"{self._step + 1} was due; a plan is missing or from another run."
            )
        self._step = plan.step

    def _answer_ready(self) -> None:
        while self._under_way and self._under_way[0][0].ready():
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        result, received = self._under_way.popleft()
        started = time.monotonic_ns()
        self._enter(Phase.ANSWER, result.plan.step)
        if result.check is not None:
            result.check.verify()
        answer = Answer(
            generation=self._generation,
            step=result.plan.step,
            token_ids=result.ids.wait().numpy().tobytes(),
            logprobs=result.logprobs.collect() if result.logprobs is not None else [],
            run_us=(time.monotonic_ns() - received) // 1000,
        )
        if self._answers is not None:
            self._answers.write(encode(answer))
        if self._trace is not None:
            self._trace.answered(result.plan.step, started)
        if not self._under_way:
            self._enter(Phase.IDLE, self._step)
