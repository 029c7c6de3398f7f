"""An engine in one process on the GPU, with the attention back-end that a server would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.workers.engine_in_process import EngineInProcess
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.registry import choose_backend


def engine_on_gpu(
    folder: Path, dtype: torch.dtype = torch.float32, **settings: Any
) -> EngineInProcess:
    config = ModelConfig.from_folder(folder)
    backend, _ = choose_backend(
        "auto",
        head_size=config.head_dim,
        dtype=dtype,
        block_size=16,
        windows=config.windows,
        device=torch.device("cuda"),
    )
    return EngineInProcess(
        folder, device="cuda", dtype=dtype, backend=backend, block_size=16, **settings
    )
