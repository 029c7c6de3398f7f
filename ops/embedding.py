"""Token embedding and LM head, spread over the ranks by vocabulary rows.

The vocabulary is padded to one width on every rank. Padding rows belong to no token: the embedding
never returns them, and the head gives them minus infinity on their own shard, before any argmax,
top-k or softmax could see their zeros. Weights are [padded rows of this rank, hidden].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.parameter import ShardId, empty_parameter, parameter_of
from tp_runtime.ops.partial import Hidden, later
from tp_runtime.ops.product import product
from tp_runtime.ops.sharding import Shard, vocab_shard
from tp_runtime.ops.tensor_source import TensorSource, check_shape, fill
from tp_runtime.ops.tuned_product import TunedProduct


class _VocabParallelWeight(nn.Module):
    """The shared half of embedding and head: one weight, its range, its loading."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        weight: nn.Parameter | None,
        *,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.group = group
        self.shard = vocab_shard(vocab_size, group.rank, group.size)
        if weight is None:
            weight = empty_parameter(self.shard.padded, hidden_size, dtype=dtype, device=device)
        self.weight = weight

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        return (None,)

    def full_shape(self, name: str, shard_id: ShardId = None) -> tuple[int, ...]:
        """Shape of the whole weight, as a checkpoint has it: without padding rows."""
        return (self.vocab_size, self.hidden_size)

    def load_weight(self, name: str, source: TensorSource, shard_id: ShardId = None) -> int:
        """Fills this rank's rows from the whole [vocab, hidden] weight; padding rows become 0.

        Returns the number of elements written, padding included. Raises ValueError for an unknown
        name or a wrong shape."""
        parameter = parameter_of(self, name)
        check_shape(name, source, self.full_shape(name))
        real = self.shard.size
        fill(parameter.data[:real], source, 0, Shard(self.shard.start, self.shard.stop))
        parameter.data[real:].zero_()
        return parameter.numel()


class VocabParallelEmbedding(_VocabParallelWeight):
    """Row lookup; each id is known to one rank, the others add zeros. With `sum_later` that is left
    to what follows."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        sum_later: bool = False,
    ) -> None:
        super().__init__(vocab_size, hidden_size, None, group=group, dtype=dtype, device=device)
        self.sum_later = sum_later

    def forward(self, ids: Tensor) -> Hidden:
        """[tokens] int64 -> [tokens, hidden], the same on every rank, or with `sum_later` this
        rank's part of it"""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        foreign = (ids < self.shard.start) | (ids >= self.shard.stop)
        local = (ids - self.shard.start).masked_fill(foreign, 0)
        rows = F.embedding(local, self.weight).masked_fill_(foreign.unsqueeze(-1), 0)
        return later(rows, self.group) if self.sum_later else self.group.comm.all_reduce(rows)


class ParallelLMHead(_VocabParallelWeight):
    """Projection to the vocabulary. `tied_to` shares the embedding's weight: one storage."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        weight = None if tied_to is None else tied_to.weight
        super().__init__(vocab_size, hidden_size, weight, group=group, dtype=dtype, device=device)
        self.tuned: TunedProduct | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> this rank's logits [rows, padded] in the dtype of the weight, in which
        the product is made, as transformers does; padding columns are -inf. Whoever computes with
        them widens them first.

        The caller gives only the rows whose logits are needed."""
        logits = product(hidden, self.weight, tuned=self.tuned)
        logits[:, self.shard.size :] = float("-inf")
        return logits

    def gather(self, local: Tensor) -> Tensor | None:
        """[rows, padded] of every rank -> [rows, vocab] on rank 0, None elsewhere."""
        parts = self.group.comm.gather(local)
        if parts is None:
            return None
        return torch.cat(parts, dim=-1)[:, : self.vocab_size]
