"""What `tp-runtime doctor` finds out about a machine: plain data, no judgement.

Everything that touches a GPU happens in child processes (doctor_probe), each with a time limit, so
that a driver that crashes or hangs is a fact like any other.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource

import msgspec

from tp_runtime.errors import ConfigError
from tp_runtime.launch.gpus import Gpus
from tp_runtime.launch.rank_environment import usable_cores

PACKAGES = ("tp_runtime", "torch", "triton", "transformers", "tokenizers", "pyzmq", "msgspec")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU as torch sees it; bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int


class Backend(msgspec.Struct, frozen=True):
    """An attention back-end; `reason`: why it cannot be used, empty when it can."""

    name: str
    reason: str


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process that imported torch reports. `nccl`, `cuda`: versions, empty without.
    `cuda_error`: why torch cannot use a GPU, empty when it can or when there is none."""

    cuda: str = ""
    nccl: str = ""
    cuda_error: str = ""
    gpus: list[Gpu] = []
    backends: list[Backend] = []
    chosen: str = ""
    dtype: str = ""


class Copy(msgspec.Struct, frozen=True):
    """A copy of random data from one GPU to another. `peer`: without a way through the host."""

    source: int
    target: int
    peer: bool
    right: bool
    gb_per_s: float


class Reduce(msgspec.Struct, frozen=True):
    """An all-reduce with data over `ranks` processes. `error` is empty when the sums were right."""

    backend: str
    ranks: int
    error: str = ""
    gb_per_s: float = 0.0


class Limits(msgspec.Struct, frozen=True):
    """Soft limits; -1: none. /dev/shm in bytes, 0 when it is not there."""

    nofile: int
    nproc: int
    memlock: int
    shm_total: int
    shm_free: int
    cores: int
    memory: int
    memory_free: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a machine. `present`: GPUs the driver knows; `visible`: of those, not hidden
    by CUDA_VISIBLE_DEVICES (`mask`). `*_error`: why a probe brought nothing, else empty."""

    python: str
    system: str
    packages: dict[str, str]
    driver: str = ""
    present: int = 0
    visible: int = 0
    mask: str | None = None
    gpu_error: str = ""
    torch: TorchFacts = TorchFacts()
    torch_error: str = ""
    copies: list[Copy] = []
    copy_error: str = ""
    reduce: Reduce | None = None
    limits: Limits


def package_versions() -> dict[str, str]:
    """Version of each of PACKAGES; empty where it is not installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def python_version() -> str:
    return platform.python_version()


def system_name() -> str:
    return f"{platform.system()} {platform.release()}, {platform.machine()}"


def gpus_of_the_driver() -> tuple[Gpus, str]:
    """What NVML tells, and why it told nothing."""
    try:
        return Gpus.seen(), ""
    except ConfigError as error:
        return Gpus((), 0, os.environ.get("CUDA_VISIBLE_DEVICES")), str(error)


def read_limits() -> Limits:
    """Of this process, which are those a server started here would have."""
    try:
        shm = os.statvfs("/dev/shm")
        shm_total, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except OSError:
        shm_total = shm_free = 0
    memory, free = _memory()
    return Limits(
        _soft(resource.RLIMIT_NOFILE),
        _soft(resource.RLIMIT_NPROC),
        _soft(resource.RLIMIT_MEMLOCK),
        shm_total,
        shm_free,
        usable_cores(),
        memory,
        free,
    )


def _soft(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _memory() -> tuple[int, int]:
    """Bytes of main memory in all, and those that a program could get now."""
    sizes = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                sizes[name] = int(rest.split()[0]) * 1024
    except OSError:
        return 0, 0
    return sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
