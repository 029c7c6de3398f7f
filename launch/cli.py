"""The command `tp-runtime`.

Every command lives in a module of its own, loaded when it is run, so that `--help` and refusals are
quick. Whatever goes wrong ends as one sentence on the terminal and a status that is not 0.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import click

from tp_runtime.errors import ConfigError, TPRuntimeError
from tp_runtime.launch import exit_status
from tp_runtime.launch.server_notice import print_failure


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is defined, and its line in the list of commands."""

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "serve": LazyCommand("tp_runtime.launch.serve_cli", "serve_command", "Run a server."),
    "generate": LazyCommand(
        "tp_runtime.launch.generate", "generate_command", "Complete prompts and exit."
    ),
    "chat": LazyCommand("tp_runtime.launch.chat", "chat_command", "Talk to a model."),
    "doctor": LazyCommand(
        "tp_runtime.launch.doctor", "doctor_command", "Say what is wrong here, and what fits."
    ),
    "demo": LazyCommand(
        "tp_runtime.launch.demo", "demo_command", "Run a small real model on two workers."
    ),
}


class _Commands(click.Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """A tensor-parallel runtime for language models."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and end the process with its status."""
    status = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # children are gone by now; torch's destructors need not run


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        result: Any = commands.main(arguments, prog_name="tp-runtime", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exit_status.of_signal(2)
    except click.ClickException as error:
        return _say(error.format_message(), exit_status.REFUSED)
    except ConfigError as error:
        return _say(str(error), exit_status.REFUSED)
    except TPRuntimeError as error:
        return _say(str(error), exit_status.FAILED)
    return result if isinstance(result, int) else exit_status.OK


def _say(message: str, status: int) -> int:
    print_failure(message)
    return status


if __name__ == "__main__":
    main()
