"""Where the processes of one server on one host find each other: its run folder.

All servers of a user lie in one root, `$XDG_RUNTIME_DIR/tp_runtime` or a folder of mode 0700 in the
temporary directory. A server's folder is named after its owner, the process whose end is the end of
the server (torchrun, `tp-runtime serve`, or the program that made an `LLM`): pid and start time, so
that a reused pid is never taken for it. In it:

    keepers.sock      coordinator listens; keepers connect
    client.sock       coordinator listens, unless --listen names another address
    config.json       the EngineConfig all processes share, written by the first keeper
    coordinator.json  who the coordinator is, written by the keeper that started it
    starts.json       how many coordinators there have been
    server.json       address and model; written by the coordinator after it has bound its sockets
    http.json         URL of the HTTP server, if there is one; written by who bound its socket
    status.json       what the server is doing now, for whoever waits for it
    failure.json      the first cause of its end
    door.json         how relays of other hosts reach the coordinator (see DoorKey)
    claimed           there when a launcher of ours reads failure.json and removes the folder
    private           there when the server belongs to one program and is not listed for others

Every file is written whole and then moved into place. This module knows no sockets, no torch and
none of the other processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError, TPRuntimeError, error_from_code

S = TypeVar("S", bound=msgspec.Struct)


class ProcessId(msgspec.Struct, frozen=True):
    """A process that is never mistaken for another: pid and start time (clock ticks after boot)."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises ProcessLookupError when there is no such process."""
        return cls(pid, process_start_time(pid))

    @classmethod
    def current(cls) -> ProcessId:
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """False once it is gone or a zombie, also when another process has its pid now."""
        try:
            return process_start_time(self.pid) == self.start_time
        except ProcessLookupError:
            return False


def process_start_time(pid: int) -> int:
    """Start time from /proc, clock ticks after boot; ProcessLookupError when gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"There is no process {pid}.") from error
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    if fields[0] in "ZX":
        raise ProcessLookupError(f"Process {pid} has ended.")
    return int(fields[19])


def process_birth() -> float:
    """When this process began, on the clock of `time.monotonic()`."""
    ticks = process_start_time(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process (SIGSTOP); False when it is gone."""
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One running server, as `server.json` tells it. `process` is its coordinator."""

    address: str
    model: str
    tensor_parallel_size: int
    device: str
    process: ProcessId


class HttpAddress(msgspec.Struct, frozen=True):
    url: str


class Starts(msgspec.Struct, frozen=True):
    """How many coordinators were started in this folder, one after the other."""

    coordinators: int


class Status(msgspec.Struct, frozen=True):
    """`state`: starting, ready, recovering, draining. `text` says what is being waited for."""

    state: str
    text: str = ""


class Failure(msgspec.Struct, frozen=True):
    """Why a server ended: `code` of tp_runtime.errors and one sentence or block for the reader."""

    code: str
    message: str

    def error(self) -> TPRuntimeError:
        return error_from_code(self.code, self.message)


class DoorKey(msgspec.Struct, frozen=True):
    """How a relay reaches the coordinator, besides the address of its host: a secret `token`, and
    the run whose messages it takes. On the coordinator's host the coordinator writes it; elsewhere
    it has come through torchrun's store."""

    port: int
    token: str
    run_id: str


class RunFolder:
    """The folder of one server. Nothing is created before `create`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def for_owner(cls, owner: ProcessId, suffix: str = "") -> RunFolder:
        """`suffix` tells several servers of one owner apart."""
        tail = f"-{suffix}" if suffix else ""
        return cls(run_root() / f"{owner.pid}-{owner.start_time}{tail}")

    def create(self, *, claimed: bool = False, private: bool = False) -> RunFolder:
        """Make the folder if it is not there; marks are only ever added."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, wanted in (("claimed", claimed), ("private", private)):
            if wanted:
                (self.path / name).touch(mode=0o600)
        return self

    @property
    def keepers_socket(self) -> Path:
        return self.path / "keepers.sock"

    @property
    def client_socket(self) -> Path:
        return self.path / "client.sock"

    @property
    def claimed(self) -> bool:
        return (self.path / "claimed").exists()

    @property
    def private(self) -> bool:
        return (self.path / "private").exists()

    def owner_alive(self) -> bool:
        """Whether the process that gave the folder its name still runs."""
        parts = self.path.name.split("-")
        try:
            return ProcessId(int(parts[0]), int(parts[1])).alive()
        except (ValueError, IndexError):
            return False

    def recovering(self) -> bool:
        """Whether the server was announced, its coordinator is gone, and another one is to come:
        nobody has said why there should be none."""
        server = self.read_server()
        if server is None or server.process.alive():
            return False
        return self.read_failure() is None and self.owner_alive()

    def write_config(self, config: EngineConfig) -> None:
        self._write("config.json", config)

    def read_config(self) -> EngineConfig | None:
        return self._read("config.json", EngineConfig)

    def write_coordinator(self, process: ProcessId) -> None:
        self._write("coordinator.json", process)

    def read_coordinator(self) -> ProcessId | None:
        return self._read("coordinator.json", ProcessId)

    def write_door(self, key: DoorKey) -> None:
        self._write("door.json", key)

    def read_door(self) -> DoorKey | None:
        return self._read("door.json", DoorKey)

    def forget_door(self) -> None:
        """What was written is that of a coordinator that is gone."""
        (self.path / "door.json").unlink(missing_ok=True)

    def count_coordinator(self) -> int:
        """Call it when another coordinator is started here; the first one is 1."""
        before = self._read("starts.json", Starts)
        number = 1 if before is None else before.coordinators + 1
        self._write("starts.json", Starts(number))
        return number

    def write_server(self, info: ServerInfo) -> None:
        """Publish the address; call it after the sockets are bound."""
        self._write("server.json", info)

    def read_server(self) -> ServerInfo | None:
        return self._read("server.json", ServerInfo)

    def write_http(self, url: str) -> None:
        self._write("http.json", HttpAddress(url))

    def read_http(self) -> str:
        """URL of the HTTP server; empty when there is none."""
        found = self._read("http.json", HttpAddress)
        return "" if found is None else found.url

    def write_status(self, state: str, text: str = "") -> None:
        """For people and programs that look; nothing depends on it, so where there is no room for
        it (the folder's file system is often a small one in memory) the last one stays."""
        with contextlib.suppress(OSError):
            self._write("status.json", Status(state, text))

    def read_status(self) -> Status | None:
        return self._read("status.json", Status)

    def write_failure(self, code: str, message: str) -> bool:
        """Record why the server ends. The first cause stays; False when there was one already, or
        no room for it."""
        try:
            temporary = self._write_temporary("failure.json", Failure(code, message))
        except FileNotFoundError:
            raise  # the folder is gone
        except OSError:
            return False
        try:
            os.link(temporary, self.path / "failure.json")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def read_failure(self) -> Failure | None:
        return self._read("failure.json", Failure)

    def close(self) -> None:
        """For the coordinator's end: nothing is left, except what a living claimer still reads."""
        if self.claimed and self.owner_alive():
            for name in ("keepers.sock", "client.sock", "server.json", "status.json"):
                (self.path / name).unlink(missing_ok=True)
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the folder and everything in it; harmless when it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, value: msgspec.Struct) -> None:
        os.replace(self._write_temporary(name, value), self.path / name)

    def _write_temporary(self, name: str, value: msgspec.Struct) -> Path:
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.encode(value))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _read(self, name: str, kind: type[S]) -> S | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=kind)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None


def run_root() -> Path:
    """The folder that holds this user's run folders; made when it is not there.

    Raises ConfigError when a folder of that name is another user's or open to others."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
        root = Path(runtime) / "tp_runtime"
    else:
        root = Path(tempfile.gettempdir()) / f"tp_runtime-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{root} is not a folder of yours with mode 0700 (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}); remove it, or set XDG_RUNTIME_DIR to a folder "
            "of your own."
        )
    return root


def list_servers() -> list[ServerInfo]:
    """The running servers of this user on this host that are open to every program, those whose
    coordinator is being started again among them.

    Folders left behind by dead processes are removed on the way."""
    servers = []
    for folder in _folders():
        info = folder.read_server()
        if info is not None and (info.process.alive() or folder.recovering()):
            if not folder.private:
                servers.append(info)
        elif not folder.owner_alive() and not _coordinator_alive(folder):
            folder.remove()
    return sorted(servers, key=lambda info: info.process.start_time)


def _folders() -> list[RunFolder]:
    return [RunFolder(path) for path in sorted(run_root().iterdir()) if path.is_dir()]


def _coordinator_alive(folder: RunFolder) -> bool:
    process = folder.read_coordinator()
    return process is not None and process.alive()
