"""Who is suspected after crashes, who runs alone, who is acquitted and who is convicted."""

from __future__ import annotations

import pytest

from tests.coordinator.driving import Drive, check_outputs, make_limits, make_seq
from tp_runtime.coordinator.failure import Failure
from tp_runtime.coordinator.inbox import CancelRequest, RequestKey, SubmittedRequest
from tp_runtime.coordinator.poison import Quarantine
from tp_runtime.coordinator.request_table import RequestTable
from tp_runtime.errors import RequestFailedError, TPRuntimeError

ABORTED = Failure.exited(1, "run", 3, -6)
KILLED = Failure.exited(1, "run", 3, -9)
NAMES = "abcd"


def key(name: str) -> RequestKey:
    return RequestKey(b"client", name)


class Outlet:
    def __init__(self) -> None:
        self.errors: dict[RequestKey, TPRuntimeError] = {}

    def accepted(self, request) -> None: ...

    def updates(self, updates) -> None: ...

    def failed(self, key: RequestKey, error: TPRuntimeError) -> None:
        self.errors[key] = error


class Scene:
    """Four requests; `poison` crashes the workers in any step it takes part in."""

    def __init__(self, poison: str = "", cause: Failure = ABORTED) -> None:
        self.drive = Drive(make_limits())
        self.outlet, self.now = Outlet(), 0.0
        self.requests = RequestTable(self.outlet, 10)
        self.requests.open(self.drive.scheduler)
        self.quarantine = Quarantine(self.requests, 2, 60.0, lambda: self.now)
        self.poison, self.cause, self.crashes = poison, cause, 0
        self.alone: list[str] = []
        for name in NAMES:
            self.add(name)

    def add(self, name: str, samples: int = 1) -> None:
        seqs = [make_seq(key(name), 5, 12, sample=i) for i in range(samples)]
        for seq in seqs:
            self.drive.seqs[seq.key], self.drive.outputs[seq.key] = seq, []
        self.requests.take(SubmittedRequest(key(name), seqs))

    def running(self) -> set[str]:
        return {k.request.request_id for k in self.drive.scheduler.in_flight.alive_keys()}

    def crash(self) -> bool:
        self.crashes += 1
        convicted = self.quarantine.crashed(self.drive.scheduler, self.cause)
        self.drive.crash()
        return convicted

    def turn(self) -> None:
        self.drive.fill_window()
        if self.poison in self.running():
            self.crash()
        elif self.drive.under_way:
            self.requests.ended(self.drive.commit())
        self.quarantine.progress(self.drive.scheduler)
        alone = self.quarantine.alone
        if alone is not None and self.alone[-1:] != [alone.request_id]:
            self.alone.append(alone.request_id)

    def run(self) -> None:
        for _ in range(500):
            if self.drive.scheduler.is_idle:
                return
            self.turn()
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("poison", NAMES)
def test_only_the_one_that_crashes_alone_fails(poison):
    scene = Scene(poison)
    scene.run()
    assert list(scene.outlet.errors) == [key(poison)]
    assert isinstance(scene.outlet.errors[key(poison)], RequestFailedError)
    assert scene.crashes == 3
    check_outputs(scene.drive)
    assert len(scene.drive.ends) == len(NAMES) - 1
    assert scene.quarantine.alone is None


def test_a_kill_from_outside_convicts_nobody_the_first_time():
    scene = Scene("b", KILLED)
    scene.run()
    assert scene.crashes == 4
    assert list(scene.outlet.errors) == [key("b")]


def test_two_crashes_by_chance_cost_nobody_anything():
    scene = Scene()
    for _ in range(2):
        scene.drive.fill_window()
        assert not scene.crash()
    scene.run()
    assert scene.alone == list(NAMES)
    assert scene.outlet.errors == {}
    check_outputs(scene.drive)
    assert len(scene.drive.ends) == len(NAMES)


def test_crashes_far_apart_are_not_in_a_row():
    scene = Scene()
    for _ in range(3):
        scene.drive.fill_window()
        scene.crash()
        scene.now += 61.0
    assert scene.quarantine.alone is None
    scene.run()


def test_crashes_with_nothing_under_way_suspect_nobody():
    scene = Scene()
    scene.drive.fill_window()
    scene.crash()
    scene.crash()
    assert scene.quarantine.alone is None
    scene.run()


def test_whoever_did_not_get_on_between_the_crashes_is_tried_first():
    scene = Scene()
    for _ in range(6):
        scene.drive.round()
    scene.drive.fill_window()
    scene.crash()
    scene.requests.take(CancelRequest(key("a")))
    for _ in range(3):
        scene.drive.round()
    scene.drive.fill_window()
    got_on = {name: len(ids) for (k, _), ids in scene.drive.outputs.items() for name in k[1]}
    scene.crash()
    assert scene.quarantine.alone is not None
    assert scene.quarantine.alone != key("a")
    assert got_on[scene.quarantine.alone.request_id] == min(got_on[n] for n in "bcd")


def test_a_suspect_that_is_cancelled_gives_way_to_the_next():
    scene = Scene()
    for _ in range(2):
        scene.drive.fill_window()
        scene.crash()
    assert scene.quarantine.alone == key("a")
    scene.requests.take(CancelRequest(key("a")))
    scene.quarantine.progress(scene.drive.scheduler)
    assert scene.quarantine.alone == key("b")
    scene.run()


def test_all_samples_of_a_request_are_one_suspect():
    scene = Scene()
    scene.run()
    scene.add("many", samples=3)
    for _ in range(2):
        scene.drive.fill_window()
        scene.crash()
    assert scene.quarantine.alone == key("many")
    scene.run()
    check_outputs(scene.drive)
