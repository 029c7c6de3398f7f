"""The rate at which a GPU copies its own memory: the denominator of "percent of the limit".

    python -m tp_runtime.launch.bench.copy_rate

prints bytes read and written per second. A process of its own, so that nothing of it is left on the
GPU when a server starts there.
"""

from __future__ import annotations

import subprocess
import sys

from tp_runtime.errors import ConfigError
from tp_runtime.local_server import child_environment

_BYTES = 2 << 30
_COPIES = 20


def measure_copy_rate() -> float:
    """Bytes per second. Raises ConfigError when it cannot be measured."""
    done = subprocess.run(
        [sys.executable, "-m", "tp_runtime.launch.bench.copy_rate"],
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"The GPU's copy rate could not be measured: {done.stderr[-500:]}")
    return float(done.stdout)


def main() -> None:
    import torch

    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_COPIES):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    print(2 * _BYTES * _COPIES / (start.elapsed_time(end) / 1000))


if __name__ == "__main__":
    main()
