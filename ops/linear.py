"""Linear layers whose weight is spread over the ranks (Megatron-LM, arXiv:1909.08053, section 3).

Column-parallel layers hold some output rows and need no communication; row-parallel layers hold
some input columns and end in an all-reduce. A column-parallel layer followed by a row-parallel one
over the same range keeps the activation between them sharded. Weights are [outputs, inputs].

Parameters are uninitialised until `load_weight` fills them from the *whole* tensor of the
checkpoint, of which only this rank's range is read. It returns the number of parameter elements it
wrote, so that a loader can prove that nothing was left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.parameter import ShardId, empty_parameter, parameter_of
from tp_runtime.ops.partial import Hidden, later
from tp_runtime.ops.product import product, product_into
from tp_runtime.ops.sharding import Shard, kv_head_shard, tile_shard
from tp_runtime.ops.tensor_source import TensorSource, check_shape, fill
from tp_runtime.ops.tuned_product import TunedProduct


class PackedColumnLinear(nn.Module):
    """Several column-parallel projections of one input in one matrix product.

    `parts` maps a shard id to (outputs of the whole projection, range kept by this rank). The local
    weight stacks the kept ranges in that order: [sum of range sizes, input_size]."""

    def __init__(
        self,
        input_size: int,
        parts: dict[ShardId, tuple[int, Shard]],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.parts = parts
        self.local_sizes = [shard.size for _, shard in parts.values()]
        rows = sum(self.local_sizes)
        self.weight = empty_parameter(rows, input_size, dtype=dtype, device=device)
        self.bias = empty_parameter(rows, dtype=dtype, device=device) if bias else None
        self.tuned: TunedProduct | None = None

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        """The ids `load_weight` must be called with, once each per parameter."""
        return tuple(self.parts)

    def full_shape(self, name: str, shard_id: ShardId = None) -> tuple[int, ...]:
        """Shape of the whole "weight" or "bias" of one projection, as a checkpoint has it."""
        outputs, _ = self.parts[shard_id]
        return (outputs, self.input_size) if name == "weight" else (outputs,)

    def load_weight(self, name: str, source: TensorSource, shard_id: ShardId = None) -> int:
        """Fills this rank's rows of one projection from its whole "weight" or "bias".

        Raises ValueError for an unknown name or shard id, or a wrong shape."""
        parameter = parameter_of(self, name)
        if shard_id not in self.parts:
            raise ValueError(
                f"{type(self).__name__} has no shard id {shard_id!r}; "
                f"known are {', '.join(map(repr, self.parts))}."
            )
        shard = self.parts[shard_id][1]
        what = name if shard_id is None else f"{name} of shard {shard_id!r}"
        check_shape(what, source, self.full_shape(name, shard_id))
        offset = sum(self.local_sizes[: self.shard_ids.index(shard_id)])
        return fill(parameter.data[offset : offset + shard.size], source, 0, shard)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, input_size] -> [tokens, local outputs]"""
        return product(x, self.weight, self.bias, self.tuned)


class ColumnParallelLinear(PackedColumnLinear):
    """y = x W^T + b with the outputs spread over the ranks; each rank returns its own columns.

    `output_shard` overrides the range, which is split in tiles of `tile` otherwise."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        output_shard: Shard | None = None,
        tile: int = 128,
    ) -> None:
        if output_shard is None:
            output_shard = tile_shard(output_size, group.rank, group.size, tile)
        super().__init__(
            input_size, {None: (output_size, output_shard)}, bias=bias, dtype=dtype, device=device
        )
        self.output_shard = output_shard


class MergedColumnParallelLinear(PackedColumnLinear):
    """Projections 0, 1, … of one input, each split alike (gate and up of SwiGLU).

    The local output is [tokens, local part of projection 0 | local part of projection 1 | …]."""

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        bias: bool = False,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        tile: int = 128,
    ) -> None:
        parts: dict[ShardId, tuple[int, Shard]] = {
            index: (size, tile_shard(size, group.rank, group.size, tile))
            for index, size in enumerate(output_sizes)
        }
        super().__init__(input_size, parts, bias=bias, dtype=dtype, device=device)


class QKVParallelLinear(PackedColumnLinear):
    """Query, key and value projections, split by heads; shard ids "q", "k", "v".

    `num_heads` and `num_kv_heads` are those of the whole model. With more ranks than KV heads, a KV
    head and its biases are repeated on several ranks (see `kv_head_shard`). The local output is
    [tokens, q_size | kv_size | kv_size]."""

    def __init__(
        self,
        input_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        heads = kv_head_shard(num_heads, num_kv_heads, group.rank, group.size)
        q = (num_heads * head_dim, heads.q.scaled(head_dim))
        kv = (num_kv_heads * head_dim, heads.kv.scaled(head_dim))
        super().__init__(
            input_size, {"q": q, "k": kv, "v": kv}, bias=bias, dtype=dtype, device=device
        )
        self.heads = heads
        self.head_dim = head_dim
        self.num_heads = heads.q.size
        self.num_kv_heads = heads.kv.size
        self.q_size = q[1].size
        self.kv_size = kv[1].size

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, q_size | kv_size | kv_size] -> views [tokens, heads, head_dim] of q, k, v."""
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return (
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.head_dim)),
        )


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_local W_local^T, then + b, once.

    The bias is held whole by every rank and added after the reduce, at one rank too: added inside
    one rank's product it would be rounded differently from one TP size to another. `input_shard`
    is the range of the layer before (the query heads of a rank); tiles of `tile` otherwise. With
    `sum_later` the sum over ranks is left to what follows, unless there is a bias."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device | str,
        input_shard: Shard | None = None,
        tile: int = 128,
        sum_later: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.sum_later = sum_later and not bias
        if input_shard is None:
            input_shard = tile_shard(input_size, group.rank, group.size, tile)
        self.input_shard = input_shard
        self.group = group
        self.weight = empty_parameter(output_size, input_shard.size, dtype=dtype, device=device)
        self.bias = empty_parameter(output_size, dtype=dtype, device=device) if bias else None
        self.tuned: TunedProduct | None = None

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        return (None,)

    def full_shape(self, name: str, shard_id: ShardId = None) -> tuple[int, ...]:
        """Shape of the whole "weight" or "bias", as a checkpoint has it."""
        return (self.output_size, self.input_size) if name == "weight" else (self.output_size,)

    def load_weight(self, name: str, source: TensorSource, shard_id: ShardId = None) -> int:
        """Fills this rank's input columns from the whole weight, or the whole bias.

        Raises ValueError for an unknown name or a wrong shape."""
        parameter = parameter_of(self, name)
        check_shape(name, source, self.full_shape(name))
        if name == "bias":
            return fill(parameter.data, source, 0, Shard(0, self.output_size))
        return fill(parameter.data, source, 1, self.input_shard)

    def forward(self, x: Tensor) -> Hidden:
        """[tokens, local inputs] -> [tokens, output_size], the same on every rank, or with
        `sum_later` this rank's part of it"""
        parts = self.group.comm.sums_in_parts(x.shape[0])
        if parts > 1:
            y = self._in_parts(x, parts)
        elif self.sum_later:
            return later(product(x, self.weight, tuned=self.tuned), self.group)
        else:
            y = self.group.comm.all_reduce(product(x, self.weight, tuned=self.tuned))
        return y if self.bias is None else y.add_(self.bias)

    def _in_parts(self, x: Tensor, parts: int) -> Tensor:
        """The sum of one part of the tokens is made while the next is multiplied."""
        y = x.new_empty((x.shape[0], self.output_size))
        waits = []
        for rows, out in zip(x.chunk(parts), y.chunk(parts), strict=True):
            product_into(out, rows, self.weight, self.tuned)
            waits.append(self.group.comm.begin_all_reduce(out))
        for wait in waits:
            wait()
        return y
