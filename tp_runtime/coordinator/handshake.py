"""What the ranks of a new generation must agree on before they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tp_runtime.messages import WorkerLoaded


@dataclass(frozen=True)
class CacheAgreement:
    """What the ranks agreed on: blocks (the minimum of all ranks) and their size in tokens."""

    num_blocks: int
    block_size: int
    attention_backend: str
    num_parameters: int
    graph_sizes: tuple[int, ...] = ()
    """Filled in when the ranks are ready, like the one below."""
    graphs_left: int = 0

    def with_graphs(self, sizes: Sequence[int], left: int) -> CacheAgreement:
        return replace(self, graph_sizes=tuple(sizes), graphs_left=left)


@dataclass(frozen=True)
class Disagreement:
    """The first rank that differs from rank 0, and in what."""

    rank: int
    error: str


def agree(reports: Sequence[WorkerLoaded]) -> CacheAgreement | Disagreement:
    """`reports` of all ranks, in rank order."""
    first = reports[0]
    for other in reports[1:]:
        if other.digest != first.digest:
            return Disagreement(
                other.rank,
                "model config, vocabulary, parameter count or code version differ from "
                "rank 0's; give every host the same model folder and tp_runtime.",
            )
        if other.block_size != first.block_size:
            return Disagreement(
                other.rank,
                f"its KV blocks hold {other.block_size} tokens, rank 0's {first.block_size} "
                f"({other.attention_backend}, {first.attention_backend}); give --block-size or "
                "--attention-backend.",
            )
    return CacheAgreement(
        num_blocks=min(report.max_kv_blocks for report in reports),
        block_size=first.block_size,
        attention_backend=first.attention_backend,
        num_parameters=sum(report.num_parameters for report in reports),
    )
