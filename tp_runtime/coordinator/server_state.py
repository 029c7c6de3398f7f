"""What a client sees when it asks for Info: an immutable message that the engine replaces."""

from __future__ import annotations

import msgspec

from tp_runtime.coordinator.metrics import Metrics
from tp_runtime.coordinator.recovery_clock import RecoveryClock
from tp_runtime.coordinator.scheduler_stats import SchedulerStats
from tp_runtime.engine_config import EngineConfig
from tp_runtime.messages import Info
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_length import resolve_max_model_len


class ServerState:
    """`info()` may be called from any thread; everything else on the engine's."""

    def __init__(self, config: EngineConfig, model: ModelConfig, has_chat_template: bool) -> None:
        self._info = Info(
            request_id="",
            model=config.served_model_name or config.model,
            architecture=model.architecture,
            max_model_len=resolve_max_model_len(config, model),
            vocab_size=model.vocab_size,
            tensor_parallel_size=config.tensor_parallel_size,
            dtype=config.dtype,
            device=config.device,
            has_chat_template=has_chat_template,
            num_kv_blocks=0,
            block_size=0,
            state="starting",
        )

    def info(self) -> Info:
        return self._info

    def change(self, **fields: object) -> None:
        """Replaces fields of Info."""
        self._info = msgspec.structs.replace(self._info, **fields)

    def take_stats(
        self,
        stats: SchedulerStats,
        restarts: int,
        graphs_left: int,
        metrics: Metrics,
        recovery: RecoveryClock,
    ) -> None:
        """A snapshot of the scheduler's counters and of what was measured."""
        counters = stats.counters
        self.change(
            stats={
                "running": float(stats.running),
                "waiting": float(stats.waiting),
                "kv_blocks_used": float(stats.blocks_used),
                "kv_blocks_free": float(stats.blocks_free),
                "kv_blocks_cached": float(stats.blocks_cached),
                "steps": float(counters.steps),
                "prompt_tokens": float(counters.prompt_tokens),
                "generated_tokens": float(counters.generated_tokens),
                "preemptions": float(counters.preemptions),
                "worker_restarts": float(restarts),
                "graphs_left": float(graphs_left),
                **metrics.samples(stats, recovery),
            }
        )
