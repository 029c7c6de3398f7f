"""How many GPUs this process would see, without CUDA and without torch.

NVML is asked in a child process (`python -m tp_runtime.launch.gpus`): it opens /dev/nvidia*, which
a keeper must never have open when it forks. What CUDA_VISIBLE_DEVICES hides is applied here, by the
rules of the CUDA programming guide (environment variables): a comma-separated list of indices or
UUID prefixes, read up to the first entry that names no device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from tp_runtime.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ASK_TIMEOUT_S = 30.0
"""NVML takes milliseconds where the driver's persistence mode is on, seconds where it is not."""


@dataclass(frozen=True)
class Gpus:
    """`present`: UUIDs of the host's GPUs in index order. `visible`: how many CUDA would show.
    `mask`: CUDA_VISIBLE_DEVICES, None when not set."""

    present: tuple[str, ...]
    visible: int
    mask: str | None

    @classmethod
    def seen(cls) -> Gpus:
        mask = os.environ.get(VARIABLE)
        present = _ask_nvml()
        return cls(present, count_visible(present, mask), mask)

    def require(self, wanted: int) -> None:
        """Raises ConfigError when fewer than `wanted` are visible, naming all three numbers."""
        if wanted <= self.visible:
            return
        mask = "not set" if self.mask is None else repr(self.mask)
        raise ConfigError(
            f"{wanted} GPU{'s were' if wanted > 1 else ' was'} asked for (one per rank) and "
            f"{self.visible} can be seen of {len(self.present)} in this host ({VARIABLE} is "
            f"{mask}); lower --tensor-parallel-size, change {VARIABLE}, or give --device cpu."
        )


def count_visible(present: tuple[str, ...], mask: str | None) -> int:
    """Number of devices CUDA shows for this mask."""
    if mask is None:
        return len(present)
    chosen: list[str] = []
    for entry in (part.strip() for part in mask.split(",")):
        device = _device_of(entry, present)
        if device is None:
            break
        if device in chosen:
            return 0  # CUDA shows none when one is named twice
        chosen.append(device)
    return len(chosen)


def _device_of(entry: str, present: tuple[str, ...]) -> str | None:
    if entry.isdigit():
        return present[int(entry)] if int(entry) < len(present) else None
    if entry.startswith("MIG-"):
        return entry if present else None
    if entry.startswith("GPU-"):
        matches = [uuid for uuid in present if uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    return None


def _ask_nvml() -> tuple[str, ...]:
    # No trace of a driver (WSL has /dev/dxg): saves starting a process.
    if not any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))):
        return ()
    command = [sys.executable, "-m", "tp_runtime.launch.gpus"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(
            f"The GPUs of this host could not be counted ({error}); check nvidia-smi, or give "
            "--device cpu."
        ) from error
    return tuple(done.stdout.split())


def print_uuids() -> None:
    """Print the UUID of each GPU, one a line; nothing when there is no driver."""
    import pynvml  # only in this short-lived process

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    for index in range(pynvml.nvmlDeviceGetCount()):
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        print(uuid.decode() if isinstance(uuid, bytes) else uuid)


if __name__ == "__main__":
    print_uuids()
