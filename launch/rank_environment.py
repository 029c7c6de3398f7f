"""What torchrun tells a rank, and the environment a rank's libraries read when they are imported.

torch and numpy read thread counts once, at import. A keeper imports them with one thread, so that
it stays single-threaded and may fork; the forked worker then raises its own count
(`torch.set_num_threads`) to its share of the cores.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from tp_runtime.errors import ConfigError
from tp_runtime.launch.network import interface_towards

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

CUDA_UNTOUCHED = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""With it `torch.cuda.is_available()` asks NVML and leaves the process without CUDA."""


@dataclass(frozen=True)
class RankPlace:
    """Where this process stands among the ranks (0-based), as torchrun's variables say."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> RankPlace:
        """Raises ConfigError when not started by torchrun."""
        source = os.environ if environment is None else environment
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in source]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set: this program is started by torchrun, as in "
                "`torchrun --nproc-per-node=2 -m tp_runtime.launch.serve MODEL`; without torchrun "
                "use `tp-runtime serve MODEL -tp 2`."
            )
        return cls(*(int(source[name]) for name in names))

    @property
    def several_hosts(self) -> bool:
        return self.world_size != self.local_world_size

    @property
    def first_rank(self) -> int:
        """Of this host. torchrun numbers the ranks of a host consecutively."""
        return self.rank - self.local_rank

    @property
    def coordinates(self) -> bool:
        """Whether the coordinator runs on this host: where rank 0 is."""
        return self.first_rank == 0


def under_torchrun() -> bool:
    """Whether this process is a rank started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def usable_cores() -> int:
    """Cores this process may use: its affinity, and a container's CPU quota, rounded up."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return cores


def threads_per_rank(local_world_size: int) -> int:
    """Compute threads of each worker: cores / ranks of this host, at least one.

    OMP_NUM_THREADS above one is a choice of the user and wins; torchrun itself sets it to one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 1:
        return int(asked)
    return max(1, usable_cores() // local_world_size)


def prepare_imports(environment: MutableMapping[str, str], place: RankPlace) -> None:
    """Set what libraries read at import or at their first connection. Call it before torch loads.

    One thread each; ranks of one host meet over loopback, those of several hosts over the network
    that leads to MASTER_ADDR; chatter of C++ libraries is off unless the user asked for it."""
    for name in THREAD_VARIABLES:
        environment[name] = "1"
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault(*CUDA_UNTOUCHED)
    if not place.several_hosts:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment["MASTER_ADDR"] = "127.0.0.1"
    elif (interface := interface_towards(environment.get("MASTER_ADDR", ""))) is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)  # NCCL chooses well by itself
