"""The coordinator process: puts its parts together and runs the engine on the main thread.

    python -m tp_runtime.coordinator --config JSON --run-dir DIR --watch-pid PID
        [--local-ranks N --relay-interface ADDRESS] [--keeper-restarts N]

Started by the first keeper in a session of its own. It loads no torch, binds its sockets before it
publishes their addresses, and ends with the process it watches.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from tp_runtime.coordinator.engine import Engine
from tp_runtime.coordinator.frontend import Frontend
from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.coordinator.relay_door import RelayDoor
from tp_runtime.coordinator.server_state import ServerState
from tp_runtime.coordinator.worker_group import Doors
from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import TPRuntimeError
from tp_runtime.messages import KeeperMessage
from tp_runtime.model_config import ModelConfig
from tp_runtime.run_folder import ProcessId, RunFolder, ServerInfo
from tp_runtime.text.grammar import GrammarCompiler
from tp_runtime.text.tokenizer import Tokenizer
from tp_runtime.thread_name import name_this_thread
from tp_runtime.transport.fd_socket import FdListener

GC_THRESHOLDS = (50_000, 20, 50)
"""Objects of a step die at once by reference count; a collection finds next to nothing and takes
longer the more requests there are, so it is made rare."""
SWITCH_INTERVAL_S = 0.0005
"""The engine thread waits so long for the interpreter at most; Python's 5 ms are many steps."""

CRASHED = 70
"""Exit status after a fault of the coordinator itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 stopped as asked, 1 given up (the cause is in failure.json). Does
    not return when the coordinator itself fails while it serves; the first keeper then starts
    another one, as after a kill."""
    parser = argparse.ArgumentParser(prog="tp_runtime.coordinator", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--run-dir", required=True, help="run folder of the server")
    parser.add_argument("--watch-pid", type=int, required=True, help="end with this process")
    parser.add_argument("--local-ranks", type=int, default=0, help="ranks of this host; 0: all")
    parser.add_argument("--relay-interface", default="", help="where other hosts' relays connect")
    parser.add_argument("--keeper-restarts", type=int, help="how often a lost keeper comes back")
    parser.add_argument("--first-generation", type=int, default=1, help="number of workers' births")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="tp_runtime: %(message)s", stream=sys.stderr)
    name_this_thread("engine")
    folder = RunFolder(given.run_dir)
    try:
        launcher = os.pidfd_open(given.watch_pid)
    except ProcessLookupError:
        return 1
    try:
        config = EngineConfig.from_json(given.config)
        door = RelayDoor(given.relay_interface, config) if given.relay_interface else None
        local_ranks = given.local_ranks or config.tensor_parallel_size
        listener: FdListener[KeeperMessage] = FdListener(folder.keepers_socket, KeeperMessage)
        doors = Doors(listener, local_ranks, door, given.keeper_restarts, given.first_generation)
        try:
            return _serve(config, folder, launcher, doors)
        finally:
            listener.close()
            if door is not None:
                door.close()
    except Exception as error:
        trace = traceback.format_exc()
        if _serves(folder):
            print(f"tp_runtime: the coordinator failed.\n{trace}", file=sys.stderr, flush=True)
            os._exit(CRASHED)
        if isinstance(error, TPRuntimeError):
            folder.write_failure(error.code, str(error))
        else:
            folder.write_failure("error", f"The coordinator failed ({error!r}).\n{trace}")
        return 1
    finally:
        folder.close()


def _serves(folder: RunFolder) -> bool:
    """Whether clients have been told the address of this very process."""
    info = folder.read_server()
    return info is not None and info.process == ProcessId.current()


def _listen_address(config: EngineConfig, folder: RunFolder) -> str:
    """Where clients connect: where they did before, if a coordinator of this folder has died."""
    listen, before = config.listen or f"ipc://{folder.client_socket}", folder.read_server()
    if before is not None and listen.startswith("tcp://") and listen.endswith(":0"):
        return f"{listen.removesuffix('0')}{before.address.rpartition(':')[2]}"
    return listen


def _serve(config: EngineConfig, folder: RunFolder, launcher: int, doors: Doors) -> int:
    if doors.relays is not None:
        folder.write_door(doors.relays.key)
    model = ModelConfig.from_folder(config.model)
    # A folder without tokenizer files serves prompts given as token ids.
    tokenizer = Tokenizer.from_folder(config.model) if model.vocabulary else None
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    state = ServerState(config, model, has_template)
    inbox = Inbox()
    compiler = None
    if tokenizer is not None:
        compiler = GrammarCompiler(tokenizer, model.eos_token_ids, model.vocab_size)
    frontend = Frontend(
        _listen_address(config, folder), tokenizer, inbox, state.info, compiler=compiler
    )
    engine = Engine(config, model, inbox, frontend, state, doors, folder, launcher)
    frontend.start()
    folder.write_server(
        ServerInfo(
            address=frontend.address,
            model=config.served_model_name or config.model,
            tensor_parallel_size=config.tensor_parallel_size,
            device=config.device,
            process=ProcessId.current(),
        )
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    return engine.run()
