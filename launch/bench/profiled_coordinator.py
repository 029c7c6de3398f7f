"""The coordinator with its engine thread under cProfile.

python -m tp_runtime.launch.bench.profiled_coordinator FILE [the coordinator's own arguments]
"""

from __future__ import annotations

import cProfile
import sys

from tp_runtime.coordinator.process import main

if __name__ == "__main__":
    profile = cProfile.Profile()
    status = profile.runcall(main, sys.argv[2:])
    profile.dump_stats(sys.argv[1])
    sys.exit(status)
