"""A pytest plugin: after the run, the seconds and the number of tests of each test folder."""

from __future__ import annotations

from collections import defaultdict

import pytest


class SecondsPerFolder:
    """Adds up set-up, call and tear-down; a fixture shared by folders counts where it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
        if folder.endswith(".py"):
            folder = folder.rpartition("/")[0] or "."
        self.seconds[folder] += report.duration
        self.tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds:
            return
        terminalreporter.section("seconds per folder")
        for folder in sorted(self.seconds):
            count = len(self.tests[folder])
            terminalreporter.write_line(f"{self.seconds[folder]:8.1f} s {count:5d} tests  {folder}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondsPerFolder(), "seconds-per-folder-report")
