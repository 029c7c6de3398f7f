"""Groups of commands that live in modules of their own, each imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import click


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined, and its line in the list of commands."""

    module: str
    attribute: str
    summary: str


class _LazyGroup(click.Group):
    def __init__(self, name: str, summary: str, entries: Mapping[str, LazyCommand]) -> None:
        settings = {"help_option_names": ["-h", "--help"]}
        super().__init__(name, help=summary, context_settings=settings)
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])


def lazy_group(name: str, summary: str, entries: Mapping[str, LazyCommand]) -> click.Group:
    """A group of `entries` by the name of each."""
    return _LazyGroup(name, summary, entries)
