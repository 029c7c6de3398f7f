"""The block that a person reads when a server lost a worker."""

from __future__ import annotations

import pytest

from tp_runtime.coordinator.failure import Failure, Kind, first_cause, report, where_the_log_is

ECHO = Failure.raised(0, "run", 41, "RuntimeError: [gloo] Connection closed by peer", "")

KILLED = """\
---- tp_runtime: a worker failed ----------------------------------------------
Rank 2: killed by SIGKILL in phase run, step 41.
  what to do: something outside killed it; look for the kernel's out-of-memory killer (dmesg) or \
an operator.
  now: all workers are started again; requests go on.
  log: /var/log/server.log
  also failed, as a consequence: rank 0, 1
-------------------------------------------------------------------------------"""

RAISED = """\
---- tp_runtime: a worker failed ----------------------------------------------
Rank 1 failed in phase load: WeightsError: lm_head.weight is missing
  what to do: read the traceback below; run `tp-runtime doctor` to check this machine.
  now: the server does not start.
  log: /var/log/server.log
  traceback:
    Traceback (most recent call last):
      File "loader.py", line 1
-------------------------------------------------------------------------------"""

HOST = """\
---- tp_runtime: a worker failed ----------------------------------------------
Rank 3: its host node2 is lost: nothing was heard from it for 3 s in phase run, step 7.
  what to do: look at that host and at the output of its torchrun; then start the server again on \
every host.
  now: the server ends; torchrun has no restarts left (--max-restarts).
  log: /var/log/server.log
  also failed, as a consequence: rank 0
-------------------------------------------------------------------------------"""


def test_block_of_a_killed_worker_and_its_echoes():
    other = Failure.raised(1, "run", 41, "DistBackendError: NCCL error", "")
    killed = Failure.exited(2, "run", 41, -9)
    text = report(
        [ECHO, other, killed],
        "all workers are started again; requests go on.",
        "/var/log/server.log",
    )
    assert text == KILLED


def test_block_of_an_exception_shows_its_traceback():
    trace = 'Traceback (most recent call last):\n  File "loader.py", line 1\n'
    failure = Failure.raised(1, "load", 0, "WeightsError: lm_head.weight is missing", trace)
    assert report([failure], "the server does not start.", "/var/log/server.log") == RAISED


def test_block_of_a_lost_host():
    lost = Failure(
        Kind.HOST_LOST, 3, "run", 7, "its host node2 is lost: nothing was heard from it for 3 s"
    )
    now = "the server ends; torchrun has no restarts left (--max-restarts)."
    assert report([ECHO, lost], now, "/var/log/server.log") == HOST


@pytest.mark.parametrize(
    "cause",
    [
        Failure.exited(1, "run", 3, -11),
        Failure.exited(1, "run", 3, 7),
        Failure(Kind.HUNG, 1, "run", 3, "hangs (9.0 s)"),
        Failure(Kind.KEEPER_LOST, 1, "run", 3, "its keeper process is gone"),
        Failure(Kind.HOST_LOST, 1, "run", 3, "its host b is lost: its connection ended"),
        Failure.raised(1, "run", 3, "ValueError: bad shape", ""),
    ],
)
def test_a_cause_beats_an_echo_that_was_there_first(cause):
    assert first_cause([ECHO, cause]) is cause


def test_of_two_equal_reports_the_earlier_is_the_cause():
    first, second = Failure.exited(1, "run", 3, -9), Failure.exited(0, "run", 3, -9)
    assert first.when <= second.when
    assert first_cause([second, first]) is first


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "--gpu-memory-utilization"),
        ("killed by SIGSEGV", "--enforce-eager"),
        ("hangs (120.0 s)", "--step-deadline"),
    ],
)
def test_advice_fits_the_cause(error, hint):
    assert hint in report([Failure(Kind.RAISED, 0, "run", 1, error)], "x", "y")


def test_the_log_is_named_where_there_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "err").touch()
    monkeypatch.setattr("os.readlink", lambda path: str(tmp_path / "err"))
    assert where_the_log_is() == str(tmp_path / "err")
    monkeypatch.setattr("os.readlink", lambda path: "/dev/pts/0")
    assert "above" in where_the_log_is()


def test_a_refusal_is_told_in_its_own_sentence_alone() -> None:
    """A wrong shape is the folder's fault: no block, no traceback, no advice to run the doctor."""
    sentence = "lm_head.weight in model.safetensors: the shape must be [331, 64], not [330, 64]."
    refused = Failure.raised(1, "load", 0, sentence, "Traceback ...", "weights")
    assert report([refused, ECHO], "the server does not start.") == sentence
