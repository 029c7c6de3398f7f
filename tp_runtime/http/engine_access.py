"""The HTTP server's side of the coordinator: one AsyncClient, the model's facts, token texts.

It is made before the coordinator has an address, and outlives it: until there is one, and while it
is gone, requests get ServerUnavailableError with what is being waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from tp_runtime.async_client import AsyncClient
from tp_runtime.errors import ServerUnavailableError, TPRuntimeError
from tp_runtime.messages import Info
from tp_runtime.run_folder import RunFolder
from tp_runtime.text.tokenizer import Tokenizer

_LOOK_S = 0.05
_INFO_TIMEOUT_S = 1.0
READY = "ready"


class EngineAccess:
    """Use it on one event loop: `connect` in a task of its own, then the rest."""

    def __init__(self, folder: RunFolder, model: str = "") -> None:
        self.model = model
        """The name that clients give; known as soon as the settings of the server are."""
        self.started = int(time.time())
        self._folder = folder
        self._client: AsyncClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._max_model_len = 0

    async def connect(self) -> None:
        """Waits for the coordinator's address and the first answer."""
        while (server := self._folder.read_server()) is None:
            await asyncio.sleep(_LOOK_S)
        config = self._folder.read_config()
        if config is not None:
            with contextlib.suppress(TPRuntimeError):  # without it, ids have no texts
                self._tokenizer = await asyncio.to_thread(Tokenizer.find, config.model)
        client = AsyncClient(server.address)
        while True:
            try:
                info = await client.info()
                break
            except TPRuntimeError:
                await asyncio.sleep(_LOOK_S)
        self.model, self._max_model_len = info.model, info.max_model_len
        self._client = client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def client(self) -> AsyncClient:
        """Raises ServerUnavailableError while there is no coordinator yet."""
        if self._client is None:
            raise ServerUnavailableError(f"The server is starting: {self._waits_for()}.")
        return self._client

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    async def info(self) -> Info:
        """Raises ServerUnavailableError when the coordinator does not answer within a second."""
        try:
            async with asyncio.timeout(_INFO_TIMEOUT_S):
                return await self.client.info()
        except TimeoutError:
            raise ServerUnavailableError("The coordinator does not answer.") from None

    async def state(self) -> tuple[str, str]:
        """`ready` or why no step can be made: starting, recovering, draining, unavailable; and a
        sentence about it."""
        try:
            info = await self.info()
        except TPRuntimeError as error:
            return ("unavailable" if self._client is not None else "starting"), str(error)
        return info.state, self._waits_for() if info.state != READY else ""

    def _waits_for(self) -> str:
        status = self._folder.read_status()
        return status.text if status is not None and status.text else "its processes are starting"
