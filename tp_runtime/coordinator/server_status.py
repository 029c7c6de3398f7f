"""What the server tells about itself: the Info that clients ask for.

Written by the engine thread, read by the front end; each change replaces the whole Info, so a
reader never sees half of one.
"""

from __future__ import annotations

import msgspec

from tp_runtime.engine_config import EngineConfig
from tp_runtime.messages import Info
from tp_runtime.model_config import ModelConfig


class ServerStatus:
    """`info()` is the current one; `request_id` and `instance` are the front end's to fill in."""

    def __init__(self, info: Info) -> None:
        self._info = info

    @classmethod
    def starting(
        cls, config: EngineConfig, model: ModelConfig, max_model_len: int, has_chat_template: bool
    ) -> ServerStatus:
        """Before the workers are ready: nothing is known of the KV cache yet."""
        return cls(
            Info(
                request_id="",
                model=config.served_model_name or config.model,
                architecture=model.architecture,
                max_model_len=max_model_len,
                vocab_size=model.vocab_size,
                tensor_parallel_size=config.tensor_parallel_size,
                dtype=model.dtype if config.dtype == "auto" else config.dtype,
                device=config.device,
                has_chat_template=has_chat_template,
                num_kv_blocks=0,
                block_size=0,
                state="starting",
            )
        )

    def info(self) -> Info:
        return self._info

    def ready(self, num_kv_blocks: int, block_size: int, max_model_len: int) -> None:
        self._info = msgspec.structs.replace(
            self._info,
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
        )

    def state(self, state: str) -> None:
        self._info = msgspec.structs.replace(self._info, state=state)

    def stats(self, stats: dict[str, float]) -> None:
        self._info = msgspec.structs.replace(self._info, stats=stats)
