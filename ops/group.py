"""The ranks that share a model, and how they talk: `TPGroup` and its communicators.

Layers get a `TPGroup` in their constructor and never ask torch.distributed for a rank. This is the
file of ops that calls torch.distributed, but for the memory of `ops.symmetric`. It knows nothing of
how processes are started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator(Protocol):
    """Collectives over the ranks of one group. Tensors are contiguous, on the group's device.

    Every rank must make the same calls in the same order, with equal shapes and dtypes."""

    @property
    def name(self) -> str:
        """ "single", "gloo", "nccl" or "nccl + symmetric memory"."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in `x` or in a new tensor. Every rank gets the same bits."""
        ...

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        """As `all_reduce`, in place, while what follows is computed; `x` holds the sum after a call
        of what is returned. Ranks wait for them in the order in which they began."""
        ...

    def sums_in_parts(self, rows: int) -> int:
        """Into how many parts it pays to cut so many rows, so that the sum of one is made while the
        next is computed; the same answer on every rank."""
        ...

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """With s = sum of `x` over ranks (+ residual): (RMSNorm of s, s), as `ops.norm` has it. x,
        residual [rows, hidden], weight [hidden]. None, on every rank, and nothing done, where that
        is not one kernel for such an `x`."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The `x` of every rank, in rank order."""
        ...

    def gather(self, x: Tensor, dst: int = 0) -> list[Tensor] | None:
        """The `x` of every rank, in rank order, on rank `dst`; None elsewhere."""
        ...

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        """The `x` of rank `src`, written in place; returns `x`."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        """Part r of `x` (equal parts of dimension 0) goes to rank r; `out` collects the parts of
        all ranks in rank order; returns `out`."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def close(self) -> None:
        """Ends the group; no collective may follow."""
        ...


class _Plain:
    """A communicator whose sums are operations of their own, one after the other."""

    def sums_in_parts(self, rows: int) -> int:
        return 1

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        return None


class SingleCommunicator(_Plain):
    """One rank: every collective is the identity."""

    name = "single"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        return lambda: None

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def gather(self, x: Tensor, dst: int = 0) -> list[Tensor] | None:
        return [x]

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return x

    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        return out.copy_(x)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


_GATHERED_BYTES = 1 << 17
"""Up to so many bytes of all ranks together, gathering and adding is quicker than gloo's ring."""


_ROWS_OF_PART = 2048
"""Fewer rows make a matrix product inefficient."""
_MOST_PARTS = 4


class ProcessGroupCommunicator(_Plain):
    """Collectives of torch.distributed: gloo on CPU, NCCL on CUDA.

    Both add a given element in one order that does not depend on the rank (each element is reduced
    in one place or along one ring and then copied), so the ranks end with the same bits."""

    def __init__(self, name: Literal["gloo", "nccl"], device: torch.device) -> None:
        self.name = name
        self._device = device
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.name == "gloo" and x.nbytes * self._size <= _GATHERED_BYTES:
            return self._sum_of_all(x)
        dist.all_reduce(x)
        return x

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        work = dist.all_reduce(x, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def sums_in_parts(self, rows: int) -> int:
        return max(1, min(_MOST_PARTS, rows // _ROWS_OF_PART)) if self.name == "nccl" else 1

    def _sum_of_all(self, x: Tensor) -> Tensor:
        """As all_reduce, in the order of the ranks; rounded once where x is narrower than float32.

        Gloo's own all-reduce is a ring with two rounds per rank: 1.6 ms for the 4 KiB of a decode
        step on two busy cores, where this takes 0.5 ms."""
        parts = self.all_gather(x)
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total += part
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        out = x.new_empty((self._size, *x.shape))
        parts = list(out.unbind(0))
        if self.name == "nccl":
            dist.all_gather_into_tensor(out, x)
        else:
            dist.all_gather(parts, x)
        return parts

    def gather(self, x: Tensor, dst: int = 0) -> list[Tensor] | None:
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == dst else None
        dist.gather(x, parts, dst=dst)
        return parts

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        dist.broadcast(x, src=src)
        return x

    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        dist.all_to_all_single(out, x)
        return out

    def barrier(self) -> None:
        # A collective with data and a host wait: NCCL's own barrier guesses the device.
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class TPGroup:
    """This process's place among the ranks that hold the shards of one model."""

    rank: int
    size: int
    comm: Communicator

    def all_say_yes(self, yes: bool, device: torch.device) -> bool:
        """Collective, on `device`, which is waited for: whether every rank says so."""
        if self.size == 1:
            return yes
        ballot = torch.full((1,), int(yes), device=device)
        return int(self.comm.all_reduce(ballot)) == self.size

    @classmethod
    def single(cls) -> TPGroup:
        """The group of one rank; needs no torch.distributed."""
        return cls(0, 1, SingleCommunicator())

    @classmethod
    def from_process_group(
        cls, backend: Literal["gloo", "nccl"], device: torch.device | str
    ) -> TPGroup:
        """The default process group, after `torch.distributed.init_process_group(backend, …)`.

        Raises RuntimeError when that call has not been made."""
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has no process group yet; call init_process_group first, "
                "or use TPGroup.single() for one rank."
            )
        comm = ProcessGroupCommunicator(backend, torch.device(device))
        return cls(dist.get_rank(), dist.get_world_size(), comm)
