"""Fork, handshake, failure and restart of the workers, with keepers that only talk."""

from __future__ import annotations

import os
import socket

import pytest

from tests.coordinator.fake_keepers import FakeKeeper, GroupUnderTest
from tp_runtime.coordinator import host_memory, worker_group
from tp_runtime.coordinator.failure import Kind, first_cause
from tp_runtime.coordinator.host_memory import HostMemory
from tp_runtime.coordinator.worker_group import GroupState
from tp_runtime.messages import ForkWorker, KillWorker, Quit
from tp_runtime.transport.heartbeat import Phase


@pytest.fixture
def make(tmp_path):
    made = []

    def build(**settings) -> GroupUnderTest:
        made.append(GroupUnderTest(tmp_path, **settings))
        return made[-1]

    yield build
    for group in made:
        group.close()


def test_workers_agree_on_the_fewest_blocks_and_are_ready_together(make):
    under = make(size=3)
    under.connect()
    for keeper, blocks in zip(under.keepers, (12, 7, 9), strict=True):
        keeper.load(blocks=blocks)
    allocated = []

    def all_told() -> bool:
        allocated.extend(r[0].num_blocks for k in under.keepers if (r := k.status.receive()))
        return len(allocated) == 3

    under.until(all_told)
    assert allocated == [7, 7, 7]
    for keeper in under.keepers[:2]:
        keeper.ready()
    under.until(lambda: under.group.generation.places[1].ready)
    assert under.group.state is GroupState.STARTING
    under.keepers[2].ready()
    under.until(lambda: under.group.state is GroupState.READY)
    (agreement,) = under.events.agreements
    assert (agreement.num_blocks, agreement.block_size) == (7, 16)
    assert (agreement.graph_sizes, agreement.graphs_left) == ((1, 2), 3)
    assert agreement.num_parameters == 300
    assert [place.pid for place in under.group.generation.places] == [1000, 1001, 1002]


def test_another_digest_names_the_rank_and_gives_up(make):
    under = make(size=3)
    under.connect()
    for keeper, digest in zip(under.keepers, ("same", "same", "other"), strict=True):
        keeper.load(digest=digest)
    under.killed()
    under.until(lambda: under.group.state is GroupState.OVER)
    assert "Rank 2 failed in phase load: model config" in under.events.block
    assert "the server does not start" in under.events.block


def test_the_first_cause_beats_echoes_that_came_before(make):
    under = make()
    under.start()
    under.keepers[1].beat(41, Phase.RUN)
    under.keepers[0].raise_error("[gloo] Connection closed by peer")
    under.keepers[0].exit(1)
    under.until(lambda: bool(under.events.failures))
    under.keepers[1].exit(-11)
    under.until(lambda: under.group.restarts == 1)
    cause = first_cause(under.events.failures[0])
    assert (cause.rank, cause.kind, cause.step) == (1, Kind.KILLED, 41)
    assert cause.error == "killed by SIGSEGV"


def test_what_a_worker_said_before_its_end_is_its_report(make):
    under = make()
    under.start()
    under.keepers[1].raise_error("CUDA out of memory")
    under.keepers[1].exit(1)
    under.until(lambda: under.group.state is GroupState.KILLING)
    (failure,) = under.events.failures[0]
    assert (failure.rank, failure.kind) == (1, Kind.RAISED)
    assert "out of memory" in failure.error


def test_one_killed_worker_means_all_are_killed_and_forked_again(make):
    under = make()
    under.start()
    first = under.group.generation
    under.keepers[0].exit(-9)
    # Every rank is told, also the one that is gone: its keeper may not know yet.
    under.expect(KillWorker)
    assert under.group.state is GroupState.KILLING  # until the last one has been reaped
    under.keepers[1].exit(-9)
    forks = under.expect(ForkWorker)
    assert [fork.generation for fork in forks] == [2, 2]
    assert under.group.generation is not first
    under.become_ready()
    assert under.group.restarts == 1
    assert len(under.events.agreements) == 2


def test_an_exit_of_an_older_generation_is_nobodys(make):
    under = make()
    under.start()
    under.keepers[0].exit(-9)
    under.killed([1])
    under.until(lambda: under.group.state is GroupState.STARTING)
    under.keepers[1].socket.send(worker_group.WorkerExited(1, 1001, -9))
    under.expect(KillWorker, [0])
    under.expect(ForkWorker)
    under.become_ready()


def test_too_many_restarts_in_the_window_are_the_end(make):
    under = make(max_worker_restarts=1)
    under.start()
    under.keepers[0].exit(-9)
    under.killed([1])
    under.expect(KillWorker, [0])
    under.expect(ForkWorker)
    under.become_ready()
    under.keepers[1].exit(-6)
    under.killed([0])
    under.until(lambda: under.group.state is GroupState.OVER)
    assert "Rank 1: killed by SIGABRT" in under.events.block
    assert "given up after 1 restarts within 300 s" in under.events.block
    under.expect(KillWorker, [1])
    under.group.quit(1)
    assert [quit.status for quit in under.expect(Quit)] == [1, 1]


def test_a_lost_keeper_is_the_end_when_the_launcher_starts_no_other(make):
    under = make(restarts=0)
    under.start()
    under.keepers.pop(1).close()
    under.killed()
    under.until(lambda: under.group.state is GroupState.OVER)
    assert "Rank 1: its keeper process is gone" in under.events.block
    under.group.quit(1)
    (quit,) = under.expect(Quit)
    assert "its keeper process is gone" in quit.message  # for that host's terminal


@pytest.mark.parametrize("restarts", [1, None])
def test_a_lost_keeper_means_new_keepers_where_the_launcher_starts_them(make, restarts):
    under = make(restarts=restarts)
    under.start()
    under.keepers.pop(0).close()
    under.killed()
    assert [quit.status for quit in under.expect(Quit)] == [1]
    under.until(lambda: under.group.state is GroupState.WAITING_FOR_KEEPERS)
    under.keepers.pop().close()
    under.start()
    assert under.group.generation.number == 2


def test_a_keeper_lost_before_the_others_came_does_not_stop_the_start(make):
    under = make(restarts=None)
    early = FakeKeeper(under.path, 1, 2)
    under.until(lambda: bool(under.group._hosts))
    early.close()
    under.until(lambda: bool(under.events.failures))
    under.until(lambda: under.group.state is GroupState.WAITING_FOR_KEEPERS)
    under.start()


def test_a_start_that_takes_too_long_names_the_rank_that_is_behind(make):
    under = make(start_timeout_s=0.3)
    under.connect()
    under.keepers[0].beat(0, Phase.WARM_UP)
    under.keepers[1].beat(0, Phase.INIT)
    under.keepers[0].load()
    under.killed()
    under.until(lambda: under.group.state is GroupState.OVER)
    assert "hangs (0.3 s)" in under.events.block


def test_a_keeper_that_never_comes_is_named(make):
    under = make(start_timeout_s=0.3)
    lonely = FakeKeeper(under.path, 0, 2)
    under.until(lambda: under.group.state is GroupState.OVER)
    assert "Rank 1: its keeper never connected" in under.events.block
    lonely.close()


def test_a_worker_that_cannot_be_killed_does_not_hold_the_server(make, monkeypatch):
    monkeypatch.setattr(worker_group, "KILL_DEADLINE_S", 0.2)
    monkeypatch.setattr(worker_group, "STUCK_S", 0.4)
    under = make()
    under.start()
    killed: set[int] = set()
    monkeypatch.setattr(under.group._local, "kill_keeper", killed.add)  # its keeper may be stopped
    under.group.fail_hung(1, 5.0)
    under.expect(KillWorker)
    under.keepers[0].exit(-9)
    under.until(lambda: under.group.state is GroupState.OVER)
    assert killed == {1}
    assert "stuck in the kernel" in under.events.block


@pytest.mark.parametrize(
    ("rank", "size", "version", "why"),
    [
        (0, 2, 77, "install the same tp_runtime everywhere"),
        (0, 3, 0, "this server has 2"),
        (5, 2, 0, "has ranks 0 to 1"),
        (0, 2, 0, "already"),
    ],
)
def test_a_keeper_that_does_not_belong_here_is_sent_away(make, rank, size, version, why):
    under = make()
    first = FakeKeeper(under.path, 0, 2)
    under.until(lambda: 0 in under.group._hosts)
    under.keepers.append(FakeKeeper(under.path, rank, size, version=version))
    (quit,) = under.expect(Quit)
    assert why in quit.message
    assert under.group.state is GroupState.WAITING_FOR_KEEPERS
    first.close()


def test_exits_after_an_orderly_stop_are_no_failures(make):
    under = make()
    under.start()
    under.group.expect_exit()
    for keeper in under.keepers:
        keeper.exit(0)
    under.until(lambda: under.group.generation.all_exited)
    assert under.events.failures == []


def test_the_slowest_rank_is_the_one_furthest_behind(make):
    under = make(size=3)
    under.start()
    for keeper, step, phase in zip(
        under.keepers, (7, 6, 6), (Phase.RUN, Phase.IDLE, Phase.RUN), strict=True
    ):
        keeper.beat(step, phase)
    assert under.group.slowest_rank() == 2


def test_what_failed_just_before_the_end_is_told_as_its_reason(make):
    under = make()
    under.start()
    under.keepers[1].exit(-9)
    under.until(lambda: bool(under.events.failures))
    under.group.end_failing()
    assert "Rank 1: killed by SIGKILL" in under.events.block
    assert "its launcher is gone" in under.events.block


GARBAGE = b"\xc1 no message"


def test_a_worker_that_says_what_cannot_be_read_has_failed(make):
    under = make()
    under.start()
    under.keepers[1].status._socket.send(GARBAGE)
    under.until(lambda: bool(under.events.failures))
    (failure,) = under.events.failures[0]
    assert failure.rank == 1
    assert "could not be understood" in failure.error
    under.killed()
    under.expect(ForkWorker)


def test_garbage_at_the_door_for_keepers_is_turned_away(make, caplog):
    """It used to end the coordinator, and the server with it."""
    under = make()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(under.path))
        stranger.send(GARBAGE)
        under.until(lambda: "turned away" in caplog.text)
        assert stranger.recv(1) == b""
    under.start()


def test_a_lost_keeper_is_not_waited_for_and_its_replacement_is_known(make, monkeypatch):
    """An elastic agent ends the other ranks a moment later, by SIGTERM, and means no other end."""
    monkeypatch.setattr(worker_group, "GRACE_S", 60.0)
    under = make(restarts=1)
    under.start()
    assert not under.group.replaces_keepers
    under.keepers.pop(1).close()
    under.killed([0])
    under.until(lambda: under.group.state is GroupState.WAITING_FOR_KEEPERS)
    assert under.group.replaces_keepers


def test_memory_that_cannot_be_had_is_a_failed_start_and_tried_again(make, monkeypatch):
    under = make(max_worker_restarts=5)
    under.start()
    create, calls = HostMemory.create, []

    def full(*given):
        calls.append(given)
        if len(calls) < 3:
            raise OSError(28, "No space left on device")
        return create(*given)

    monkeypatch.setattr(HostMemory, "create", full)
    under.keepers[0].exit(-9)
    under.killed([1])
    under.until(lambda: under.group.restarts == 3)
    assert "No space left on device" in under.events.failures[-1][0].error


def test_memory_that_cannot_be_had_leaves_no_descriptor_open(monkeypatch):
    monkeypatch.setattr(host_memory, "create_doorbell", fail_with_no_descriptors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        HostMemory.create(2)
    assert len(os.listdir("/proc/self/fd")) == before


def fail_with_no_descriptors() -> int:
    raise OSError(24, "Too many open files")
