"""A user's own script under torchrun: one server, one script body.

    with tp_runtime.launch.session(MODEL) as client:
        print(client.generate("Hello").text)

    torchrun --nproc-per-node=2 script.py

Every rank runs the script up to `session(...)`. There each rank but the first *becomes* the keeper
of its rank: the process replaces itself (exec) and never comes back to the script; it ends with
status 0 when the server does. Rank 0 starts the keeper of its own rank as a child process, waits
until the server is ready, and alone runs the body with a connected `Client`.

So what stands before `session` runs on every rank, what stands in and after the `with` on rank 0
only, and the number of worker processes is the number of ranks. Replacing the process, rather than
forking it, makes it matter nothing what the script imported or which threads it runs. Open files
and temporary folders of the other ranks are left as an ended process leaves them: call `session`
early. Should torchrun be killed, rank 0's script gets SIGTERM and everything else ends.

Without torchrun the same call starts the server as `LLM` does; `tensor_parallel_size` then says how
many ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError, ServerUnavailableError
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo

if TYPE_CHECKING:
    from tp_runtime.client import Client

_MODULE = "tp_runtime.launch.serve"
_CLOSE_S = 5.0
_TURN_S = 0.02


@contextlib.contextmanager
def session(
    model: str | os.PathLike[str], tensor_parallel_size: int | None = None, **options: Any
) -> Iterator[Client]:
    """A connected `Client` of a server over the ranks of this torchrun; see the module's text.

    `options` are the fields of EngineConfig. Raises ConfigError for settings that cannot work, on
    rank 0 what kept the server from starting, and whatever the body raises."""
    from tp_runtime.launch.parent_death import die_with_parent
    from tp_runtime.launch.rank_environment import RankPlace, under_torchrun
    from tp_runtime.llm import LLM, config_from_options

    if not under_torchrun():
        with LLM(model, tensor_parallel_size or 1, **options) as llm:
            yield llm.client
        return
    place = RankPlace.from_environment()
    if tensor_parallel_size not in (None, place.world_size):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} contradicts torchrun's "
            f"{place.world_size} ranks; leave it out, or start {tensor_parallel_size} ranks."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("session(...) must be called on the main thread of the script.")
    config = config_from_options(model, place.world_size, options)
    agent = ProcessId.of(os.getppid())
    command = _keeper_command(config, agent)
    if place.rank != 0:
        _become(command)
    if not die_with_parent(agent.pid, signal.SIGTERM):
        raise ServerUnavailableError("The torchrun that started this script is gone.")
    with _RankZero(command, agent) as server:
        yield server.client


def _keeper_command(config: EngineConfig, agent: ProcessId) -> list[str]:
    command = [sys.executable, "-m", _MODULE, "--engine-config", config.to_json()]
    return [*command, "--agent-pid", str(agent.pid)]


def _become(command: list[str]) -> NoReturn:
    _let_children_find_this_package()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _let_children_find_this_package() -> None:
    from tp_runtime.local_server import child_environment

    os.environ["PYTHONPATH"] = child_environment().get("PYTHONPATH", "")


class _RankZero:
    """Rank 0's keeper as a child process, and the client that the body gets."""

    def __init__(self, command: list[str], agent: ProcessId) -> None:
        self._folder = RunFolder.for_owner(agent)
        _let_children_find_this_package()
        self._keeper = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.client: Client

    def __enter__(self) -> _RankZero:
        from tp_runtime.client import Client

        try:
            self.client = Client(self._wait_ready().address)
        except BaseException:
            self._stop()
            raise
        return self

    def _wait_ready(self) -> ServerInfo:
        while True:
            failure = self._folder.read_failure()
            if failure is not None:
                raise failure.error()
            status, info = self._folder.read_status(), self._folder.read_server()
            if status is not None and status.state == "ready" and info is not None:
                return info
            if self._keeper.poll() is not None:
                raise ServerUnavailableError(
                    f"The keeper of rank 0 ended with status {self._keeper.returncode} before the "
                    "server was ready; its message is above."
                )
            time.sleep(_TURN_S)

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self._stop()

    def _stop(self) -> None:
        """End the server through its coordinator; the keepers of all ranks end with it."""
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGINT)
        try:
            self._keeper.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
