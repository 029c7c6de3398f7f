"""The command `tp-runtime serve`: flags, and the pipe by which a program owns its server."""

from __future__ import annotations

from typing import Any

import click

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch.http_options import http_options, take_http_options
from tp_runtime.launch.options import engine_config, engine_options, take_engine_options
from tp_runtime.launch.server_command import Owner, serve
from tp_runtime.run_folder import ProcessId, RunFolder


@click.command("serve")
@click.argument("model", required=False)
@engine_options
@http_options
@click.option("--engine-config", default="", hidden=True, help="All settings, as JSON.")
@click.option("--owned-by", nargs=3, type=int, hidden=True, help="Pid, start time, pipe.")
@click.option("--run-dir", default="", hidden=True, help="Run folder, made by the owner.")
def serve_command(model: str | None, **options: Any) -> int:
    """Serve MODEL, a folder or a name on the Hugging Face hub, until Ctrl-C or SIGTERM.

    SIGTERM lets running requests finish within --drain-timeout; Ctrl-C ends them; a second signal
    ends everything at once. The exit status is 0 after a signal, 1 when the server failed, 2 when
    a setting cannot work.
    """
    settings, http = take_engine_options(options), take_http_options(options)
    if options["engine_config"]:
        config, http = EngineConfig.from_json(options["engine_config"]), None  # a program's own
    elif model:
        config = engine_config(model, settings)
    else:
        raise ConfigError("No model was given; give a folder or a name such as Qwen/Qwen3-0.6B.")
    owner = None
    if options["owned_by"]:
        pid, start_time, pipe = options["owned_by"]
        owner = Owner(ProcessId(pid, start_time), pipe, RunFolder(options["run_dir"]))
    return serve(config, owner, http)
