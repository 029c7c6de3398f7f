"""How many blocks fit: what is free, what a step needs, and what graphs take."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import ConfigError
from tp_runtime.workers.kv_cache import GIB, KVGeometry, MemoryBefore, max_blocks

CUDA = torch.device("cuda", 0)
GEOMETRY = KVGeometry(4, 16, 8, 128, torch.bfloat16)
BLOCK = GEOMETRY.block_bytes
BEFORE = MemoryBefore(free=100 * GIB, total=120 * GIB)


@pytest.fixture(autouse=True)
def weights_of_20_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 120 * GIB))


def blocks(part: float, peak: int = 0, graphs: int = 0, useful: int = 1 << 40) -> int:
    config = EngineConfig(model="m", gpu_memory_utilization=part)
    return max_blocks(config, GEOMETRY, CUDA, BEFORE, peak, graphs, useful)


def test_what_other_programs_hold_does_not_count() -> None:
    assert blocks(0.9) == (90 - 20) * GIB // BLOCK
    assert blocks(0.9, peak=5 * GIB) == (90 - 20 - 5) * GIB // BLOCK
    assert blocks(0.9, useful=7) == 7


def test_graphs_take_what_the_utilization_leaves_and_then_from_the_cache() -> None:
    assert blocks(0.9, graphs=3 * GIB) == blocks(0.9)
    assert blocks(1.0, graphs=3 * GIB) == (100 - 20 - 3) * GIB // BLOCK
    assert blocks(1.0, peak=2 * GIB, graphs=3 * GIB) == (100 - 20 - 5) * GIB // BLOCK


def test_too_little_is_said_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        blocks(0.3, peak=10 * GIB, graphs=2 * GIB)
    for number in ("100.00 GiB of 120.00 GiB", "weights take 20.00", "10.00 GiB", "2.00 GiB"):
        assert number in str(error.value)
