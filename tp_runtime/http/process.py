"""The HTTP process: serves on a socket that it inherits, until the process that started it ends.

    python -m tp_runtime.http --run-dir DIR --socket FD --watch-pid PID

The key comes in the environment (TP_RUNTIME_API_KEY), where other users cannot read it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import uvicorn

from tp_runtime.http.app import build_app
from tp_runtime.http.engine_access import EngineAccess
from tp_runtime.run_folder import RunFolder

API_KEY_VARIABLE = "TP_RUNTIME_API_KEY"
GRACE_S = 1
"""After SIGTERM answers under way get so many seconds to leave."""
KEEP_ALIVE_S = 75
GC_THRESHOLDS = (50_000, 20, 50)
"""What a request leaves behind dies by reference count; looking for more is made rare."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tp_runtime.http", description=__doc__)
    parser.add_argument("--run-dir", required=True, help="run folder of the server")
    parser.add_argument("--socket", type=int, required=True, help="descriptor that listens")
    parser.add_argument("--watch-pid", type=int, required=True, help="end with this process")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="tp_runtime: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of every broken request
    try:
        watched = os.pidfd_open(given.watch_pid)
    except ProcessLookupError:
        return 1
    threading.Thread(target=_end_with, args=(watched,), name="watch", daemon=True).start()
    listening = socket.socket(fileno=given.socket)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(RunFolder(given.run_dir), listening))
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which is quicker; Python's own where it is missing."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _end_with(pidfd: int) -> None:
    """A thread of its own: it ends the process also when the event loop is stuck."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(0)


async def _serve(folder: RunFolder, listening: socket.socket) -> None:
    config = folder.read_config()
    engine = EngineAccess(folder, "" if config is None else config.served_model_name)
    app = build_app(engine, os.environ.get(API_KEY_VARIABLE, ""))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks where a client comes from
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    connecting = asyncio.create_task(engine.connect())
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        await server.serve(sockets=[listening])
    finally:
        connecting.cancel()
        await engine.close()
