"""The table that `make faults` prints: what was killed, and what it cost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.fault_server import Recovery

HEAD = ("victim", "phase", "fault", "detected after", "recovered after", "tokens lost", "leftovers")
_ROWS: list[tuple[str, ...]] = []


class FaultTable:
    """Rows are added by tests that have checked everything; a case that failed has none."""

    def add(
        self, victim: str, phase: str, fault: str, recovery: Recovery, lost: int, left: int = 0
    ) -> None:
        times = f"{recovery.detected_s:.2f} s", f"{recovery.recovered_s:.2f} s"
        _ROWS.append((victim, phase, fault, *times, str(lost), str(left or "none")))


@pytest.fixture
def fault_table() -> FaultTable:
    return FaultTable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _ROWS:
        return
    table = [HEAD, *_ROWS]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    terminalreporter.section("faults")
    terminalreporter.write_line("\n".join(lines))
    if path := os.environ.get("FAULT_TABLE"):
        Path(path).write_text("\n".join(lines) + "\n")
