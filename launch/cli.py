"""The command `tp-runtime`.

Every command lives in a module of its own, loaded when it is run, so that `--help` and refusals are
quick. Whatever goes wrong ends as one sentence on the terminal and a status that is not 0.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from tp_runtime.errors import ConfigError, TPRuntimeError
from tp_runtime.launch import exit_status
from tp_runtime.launch.lazy_group import LazyCommand, lazy_group
from tp_runtime.launch.server_notice import print_failure

COMMANDS = {
    "serve": LazyCommand("tp_runtime.launch.serve_cli", "serve_command", "Run a server."),
    "generate": LazyCommand(
        "tp_runtime.launch.generate", "generate_command", "Complete prompts and exit."
    ),
    "chat": LazyCommand("tp_runtime.launch.chat", "chat_command", "Talk to a model."),
    "bench": LazyCommand("tp_runtime.launch.bench.cli", "bench_command", "Measure."),
    "doctor": LazyCommand(
        "tp_runtime.launch.doctor", "doctor_command", "Say what is wrong here, and what fits."
    ),
    "demo": LazyCommand(
        "tp_runtime.launch.demo", "demo_command", "Run a small real model on two workers."
    ),
}


commands = lazy_group("tp-runtime", "A tensor-parallel runtime for language models.", COMMANDS)


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
