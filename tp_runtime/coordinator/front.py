"""Everything of the coordinator that clients meet, put together for one server.

The engine sees two ends of it: the inbox it drains and the outlet it speaks through.
"""

from __future__ import annotations

from pathlib import Path

from tp_runtime.coordinator.frontend import Frontend
from tp_runtime.coordinator.inbox import Inbox
from tp_runtime.coordinator.outlet import Outlet
from tp_runtime.coordinator.server_status import ServerStatus
from tp_runtime.engine_config import EngineConfig
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_length import resolve_max_model_len
from tp_runtime.text.tokenizer import Tokenizer


class Front:
    """Binds the client address at once (`config.listen`, else the unix socket `socket_path`).

    A model folder without tokenizer serves token ids only. Raises ConfigError for an address that
    cannot be bound and for broken tokenizer files."""

    def __init__(self, config: EngineConfig, model: ModelConfig, socket_path: Path) -> None:
        tokenizer = Tokenizer.find(config.model)
        self.inbox = Inbox()
        status = ServerStatus.starting(
            config,
            model,
            resolve_max_model_len(config, model),
            tokenizer is not None and tokenizer.chat_template is not None,
        )
        listen = config.listen or f"ipc://{socket_path}"
        self._frontend = Frontend(listen, tokenizer, self.inbox, status.info)
        self.outlet = Outlet(self._frontend, status)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._frontend.address

    def start(self) -> None:
        """Begins to serve; requests wait in the inbox until the engine drains it."""
        self._frontend.start()
