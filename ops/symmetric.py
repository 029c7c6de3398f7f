"""Memory that all GPUs of a host can write, and the communicator that uses it for small tensors.

The only file that touches torch's symmetric memory, whose interface is not stable
(`tests/gpu/test_symmetric.py` runs with the version at hand).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tp_runtime.ops.group import Communicator, TPGroup

if TYPE_CHECKING:
    from tp_runtime.ops.kernels.one_shot import Inboxes

_FEW_ROWS = 32
"""So many are sent word by word with their numbers; measured with 4,096 elements on two H200."""
_MAX_ROWS = 512
_MAX_SENT_BYTES = 4 << 20
"""What one rank may send to all others together; beyond, NCCL's ring moves less."""
_GATHERED_WORDS = 2048
_SELF_TEST_LOOKS = 1_000_000
"""Each takes about a microsecond: a self-test fails after a second or two."""


class SymmetricCommunicator:
    """`inner` for large tensors; one-shot exchanges for rows of `hidden` elements of `dtype`, few
    enough, and for gathering a few bytes. See `ops.kernels.one_shot`."""

    def __init__(
        self, inner: Communicator, rank: int, size: int, hidden: int, dtype: torch.dtype
    ) -> None:
        from tp_runtime.ops.kernels import one_shot  # triton: CUDA only

        self.name = f"{inner.name} + symmetric memory"
        self._inner = inner
        self._kernels = one_shot
        self._hidden, self._dtype = hidden, dtype
        words = one_shot.words_of(hidden, dtype)
        sent = 4 * words * (size - 1)
        self.max_rows = max(1, min(_MAX_ROWS, _MAX_SENT_BYTES // sent))
        self._memory: list[Tensor] = []
        self._handles: list[object] = []
        few = min(_FEW_ROWS, self.max_rows)
        self._few = self._inboxes(rank, size, few, words)
        self._many = replace(self._inboxes(rank, size, self.max_rows, words), flagged=True)
        self._small = self._inboxes(rank, size, 1, _GATHERED_WORDS)

    def _inboxes(self, rank: int, size: int, rows: int, words: int) -> Inboxes:
        import torch.distributed._symmetric_memory as symmetric_memory

        device = torch.device("cuda", torch.cuda.current_device())
        shape = (self._kernels.SETS, size, rows, words)
        memory = symmetric_memory.empty(shape, dtype=torch.int64, device=device)
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("there is no process group")
        handle = symmetric_memory.rendezvous(memory, world)
        self._memory.append(memory)
        self._handles.append(handle)
        memory.zero_()
        return self._kernels.Inboxes(
            rank,
            size,
            rows,
            words,
            torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    # ------------------------------------------------------------ Communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self.fuses_norm(x):
            return self._inner.all_reduce(x)
        return self._kernels.one_shot_all_reduce(x, self._for(x))[0]

    def _for(self, x: Tensor) -> Inboxes:
        return self._few if x.shape[0] <= self._few.rows else self._many

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        return self._inner.begin_all_reduce(x)

    def sums_in_parts(self, rows: int) -> int:
        return self._inner.sums_in_parts(rows)

    def fuses_norm(self, x: Tensor) -> bool:
        return (
            x.dim() == 2
            and x.shape[0] <= self.max_rows
            and x.shape[1] == self._hidden
            and x.dtype == self._dtype
            and x.is_cuda
            and x.is_contiguous()
        )

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.one_shot_all_reduce(
            x, self._for(x), norm=weight, eps=eps, residual=residual
        )

    def all_gather(self, x: Tensor) -> list[Tensor]:
        small = x.nbytes <= 4 * _GATHERED_WORDS and x.nbytes % 4 == 0
        if not (small and x.is_cuda and x.is_contiguous()):
            return self._inner.all_gather(x)
        return list(self._kernels.one_shot_all_gather(x, self._small).unbind(0))

    def gather(self, x: Tensor, dst: int = 0) -> list[Tensor] | None:
        return self._inner.gather(x, dst)

    def broadcast(self, x: Tensor, src: int = 0) -> Tensor:
        return self._inner.broadcast(x, src)

    def all_to_all(self, out: Tensor, x: Tensor) -> Tensor:
        return self._inner.all_to_all(out, x)

    def barrier(self) -> None:
        self._inner.barrier()

    def close(self) -> None:
        self._handles.clear()
        self._memory.clear()
        self._inner.close()

    # ------------------------------------------------------------ self-test

    def _compile(self) -> None:
        """A first exchange that waits for nobody, as compiling may take one rank seconds longer
        than another. It leaves no trace."""
        x = torch.zeros(1, self._hidden, dtype=self._dtype, device=self._few.turns.device)
        for inboxes in (self._few, self._many):
            self._kernels.one_shot_all_reduce(x, replace(inboxes, patience=1))
        ids = torch.zeros(1, dtype=torch.int64, device=x.device)
        self._kernels.one_shot_all_gather(ids, replace(self._small, patience=1))
        self.barrier()
        for memory in self._memory:
            memory.zero_()
        for inboxes in (self._few, self._many, self._small):
            inboxes.turns.zero_()
        self.barrier()

    def self_test(self, rank: int, size: int) -> str:
        """Collective. Exchanges numbers that every rank knows; "" or what is wrong. Never waits for
        long."""
        self._compile()
        small = replace(self._small, patience=_SELF_TEST_LOOKS)
        device = self._few.turns.device
        for inboxes in (self._few, self._many) * 3:
            count = inboxes.rows
            grid = torch.arange(count * self._hidden, device=device).view(count, self._hidden) % 13
            term = (grid + rank).to(self._dtype)
            want = (size * grid + size * (size - 1) // 2).to(self._dtype)
            patient = replace(inboxes, patience=_SELF_TEST_LOOKS)
            if not torch.equal(self._kernels.one_shot_all_reduce(term, patient)[0], want):
                return "a sum over it is wrong"
        ids = torch.arange(100, device=device) + 1000 * rank
        got = self._kernels.one_shot_all_gather(ids, small)
        if got.tolist() != [[1000 * r + i for i in range(100)] for r in range(size)]:
            return "what is gathered over it is wrong"
        return ""


def with_symmetric_memory(
    group: TPGroup, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[TPGroup, str]:
    """Collective, for ranks of one host on CUDA. The group with one-shot exchanges, or the group as
    it is with the reason why; every rank gets the same. `hidden`: elements of the rows that layers
    add up, of `dtype`."""
    peers = [index for index in range(group.size) if index != group.rank]
    reason = ""
    if torch.cuda.device_count() < group.size:
        reason = "not all GPUs of the ranks are visible to each"
    elif not all(torch.cuda.can_device_access_peer(group.rank, peer) for peer in peers):
        reason = "the GPUs cannot write each other's memory"
    if not _all_agree(group, not reason, device):
        return group, reason or "another rank cannot use it"
    comm = None
    try:
        comm = SymmetricCommunicator(group.comm, group.rank, group.size, hidden, dtype)
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"torch's symmetric memory cannot be had ({type(error).__name__}: {error})"
    if not _all_agree(group, comm is not None, device) or comm is None:
        return group, reason or "another rank cannot have it"
    reason = comm.self_test(group.rank, group.size)
    if not _all_agree(group, not reason, device):
        return group, reason or "another rank's self-test failed"
    return TPGroup(group.rank, group.size, comm), ""


def _all_agree(group: TPGroup, yes: bool, device: torch.device) -> bool:
    votes = group.comm.all_reduce(torch.full((1,), int(yes), device=device))
    return int(votes) == group.size
