"""Time of the scheduler alone, by rows and context: `python -m tests.coordinator.bench_scheduler`.

Null workers answer at once; plan includes the encoding of its message, commit the reading of the
answer. Not a test: figures depend on the machine.
"""

from __future__ import annotations

import sys

from tp_runtime.coordinator.null_worker import measure_scheduler


def main() -> None:
    rows_list = [int(a) for a in sys.argv[1:]] or [1, 64, 256, 512]
    print(
        f"{'rows':>5} {'context':>8} {'window':>6} {'plan us':>8} {'commit us':>9} {'p99 us':>8} "
        f"{'bytes(largest/blocks)':>22} {'bytes(last/blocks)':>19}"
    )
    for rows in rows_list:
        for context in (1024, 32768):
            for eos in (frozenset((0,)), frozenset[int]()):
                t = measure_scheduler(rows, context, eos_token_ids=eos)
                print(
                    f"{rows:5} {context:8} {8 if not eos else 2:6} {t.plan_us:8.1f} "
                    f"{t.commit_us:9.1f} {t.p99_us:8.1f} {t.largest_plan:15}/{t.largest_growth:<6} "
                    f"{t.last_plan:12}/{t.last_growth:<6}"
                )


if __name__ == "__main__":
    main()
