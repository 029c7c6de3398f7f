"""What the scheduler may use: sizes agreed with the workers and settings of the user."""

from __future__ import annotations

import dataclasses

from tp_runtime.coordinator.handshake import CacheAgreement
from tp_runtime.engine_config import EngineConfig
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_length import resolve_max_model_len


@dataclasses.dataclass(frozen=True)
class SchedulerLimits:
    """Frozen; after workers were replaced, `Scheduler.reset` takes a new one.

    Lengths and budgets are in tokens. `graph_sizes`: numbers of decode rows the workers have a
    graph for, now or later, empty when they have none. `check_every`: steps between two comparisons
    of the device state across ranks; 1 under --check, 0 never."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_requests: int = 4096
    enable_prefix_caching: bool = True
    run_ahead: int = 8
    graph_sizes: tuple[int, ...] = ()
    check_every: int = 0

    @property
    def pool_tokens(self) -> int:
        """Tokens whose K and V the whole pool holds."""
        return self.num_blocks * self.block_size

    @property
    def max_total_len(self) -> int:
        """Longest prompt and output together. The last token is never fed, so its K and V need no
        place in the pool."""
        return min(self.max_model_len, self.pool_tokens + 1)

    @property
    def max_rows(self) -> int:
        """Rows of a batch. Every decode row runs in every step, so they must fit in the budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def limits_of(
    config: EngineConfig, model: ModelConfig, agreement: CacheAgreement
) -> SchedulerLimits:
    """For the workers that agreed on this."""
    return SchedulerLimits(
        max_model_len=resolve_max_model_len(config, model),
        vocab_size=model.vocab_size,
        num_blocks=agreement.num_blocks,
        block_size=agreement.block_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued_requests=config.max_num_queued_requests,
        enable_prefix_caching=config.enable_prefix_caching,
        run_ahead=config.run_ahead,
        graph_sizes=agreement.graph_sizes,
        check_every=1 if config.check else 0,
    )
