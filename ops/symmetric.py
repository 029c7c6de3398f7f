"""Memory that all GPUs of a host can write, and the communicator that uses it for small tensors.

The only file that touches torch's symmetric memory, whose interface is not stable
(`tests/gpu/test_symmetric.py` runs with the version at hand).
"""

from __future__ import annotations

import os
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
"""Each is a program that waits for others, so all of them must find room on a GPU at once: four of
256 threads on each of an H200's 132 processors."""
_MAX_SENT_BYTES = 4 << 20
"""What one rank may send to all others together; beyond, NCCL's ring moves less."""
_GATHERED_WORDS = 2048
_TURNS = 4
"""Exchanges in a test: each place is used again."""
_SELF_TEST_LOOKS = 1_000_000
"""Each takes about a microsecond: a self-test fails after a second or two."""


class SharedMemory:
    """Memory of this rank, zero at first, that the others of its group can write after `share`."""

    def __init__(self, words: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._module = symmetric_memory
        self.tensor = symmetric_memory.empty((words,), dtype=torch.int64, device=device)
        self.tensor.zero_()
        self._handle: object = None

    def share(self) -> Tensor:
        """Collective; [ranks] int64: where each rank's memory is seen from here."""
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("there is no process group")
        handle = self._module.rendezvous(self.tensor, world)
        self._handle = handle
        addresses = list(handle.buffer_ptrs)
        return torch.tensor(addresses, dtype=torch.int64, device=self.tensor.device)


class SymmetricCommunicator:
    """`inner` for large tensors; one-shot exchanges for rows of `hidden` elements of `dtype`, few
    enough, and for gathering a few bytes. See `ops.kernels.one_shot`.

    Not usable before `connect`; whether it works then, `test_few` and `test_many` say."""

    def __init__(
        self, inner: Communicator, rank: int, size: int, hidden: int, dtype: torch.dtype
    ) -> None:
        from tp_runtime.ops.kernels import one_shot  # triton: CUDA only

        self.name = f"{inner.name} + symmetric memory"
        self._inner = inner
        self._kernels = one_shot
        self._rank, self._size = rank, size
        self._hidden, self._dtype = hidden, dtype
        words = one_shot.words_of(hidden, dtype)
        self.max_rows = max(1, min(_MAX_ROWS, _MAX_SENT_BYTES // (4 * words * (size - 1))))
        shapes = [(min(_FEW_ROWS, self.max_rows), words), (self.max_rows, words)]
        self._shapes = [*shapes, (1, _GATHERED_WORDS)]
        """Rows and words of the three inboxes: few rows, many rows, small tensors."""
        device = torch.device("cuda", torch.cuda.current_device())
        total = sum(self._places(rows, words) for rows, words in self._shapes)
        self._memory: SharedMemory | None = SharedMemory(total, device)

    def _places(self, rows: int, words: int) -> int:
        return self._kernels.SETS * self._size * rows * words

    def connect(self) -> None:
        """Collective. Raises RuntimeError when the memory cannot be shared."""
        if self._memory is None:
            raise RuntimeError("the communicator is closed")
        self._device = self._memory.tensor.device
        base, made = self._memory.share(), []
        for rows, words in self._shapes:
            turns = torch.zeros(rows, dtype=torch.int32, device=self._device)
            made.append(self._kernels.Inboxes(self._rank, self._size, rows, words, base, turns))
            base = base + 8 * self._places(rows, words)
        self._few, self._many, self._small = made[0], replace(made[1], flagged=True), made[2]

    # ------------------------------------------------------------ Communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._fits(x):
            return self._inner.all_reduce(x)
        return self._kernels.one_shot_all_reduce(x, self._for(x))[0]

    def _for(self, x: Tensor) -> Inboxes:
        return self._few if x.shape[0] <= self._few.rows else self._many

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        return self._inner.begin_all_reduce(x)

    def sums_in_parts(self, rows: int) -> int:
        return self._inner.sums_in_parts(rows)

    def _fits(self, x: Tensor) -> bool:
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
    ) -> tuple[Tensor, Tensor] | None:
        if not self._fits(x):
            return None
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
        self._memory = None
        self._inner.close()

    # ------------------------------------------------------------ self-test

    def prepare_test(self) -> None:
        """Collective. Does what the tests do without waiting for anybody, as compiling may take one
        rank seconds longer than another. It leaves no trace."""
        for inboxes in (self._few, self._many):
            self._sum(replace(inboxes, patience=1), 0)
        self._gather(replace(self._small, patience=1))
        self.barrier()
        if self._memory is not None:
            self._memory.tensor.zero_()
        for inboxes in (self._few, self._many, self._small):
            inboxes.turns.zero_()
        self.barrier()

    def test_few(self) -> bool:
        """Whether numbers that every rank knows come out right, other ones each time, so that what
        an earlier exchange left is not taken for them. Never waits for long."""
        right = self._sums(self._few)
        return self._gather(replace(self._small, patience=_SELF_TEST_LOOKS)) and right

    def test_many(self) -> bool:
        """The same for many rows, which are sent in another way."""
        return self._sums(self._many)

    def give_up_many(self) -> None:
        """Sums of many rows are NCCL's from now on."""
        self.max_rows = self._few.rows

    def _sums(self, inboxes: Inboxes) -> bool:
        """A rank that finds a wrong sum goes on, as the others wait for it."""
        patient = replace(inboxes, patience=_SELF_TEST_LOOKS)
        results = [self._sum(patient, turn) for turn in range(_TURNS)]
        return all(results)

    def _sum(self, inboxes: Inboxes, turn: int) -> bool:
        shape = (inboxes.rows, self._hidden)
        grid = torch.arange(shape[0] * shape[1], device=self._device).view(shape) % 13 + turn
        want = (self._size * grid + self._size * (self._size - 1) // 2).to(self._dtype)
        term = (grid + self._rank).to(self._dtype)
        return torch.equal(self._kernels.one_shot_all_reduce(term, inboxes)[0], want)

    def _gather(self, inboxes: Inboxes) -> bool:
        ids = torch.arange(100, device=self._device)
        got = self._kernels.one_shot_all_gather(ids + 1000 * self._rank, inboxes)
        return got.tolist() == [[1000 * r + i for i in range(100)] for r in range(self._size)]


def with_symmetric_memory(
    group: TPGroup, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[TPGroup, str]:
    """Collective, for ranks of one host on CUDA. The group with one-shot exchanges, or the group as
    it is with the reason why; every rank gets the same. `hidden`: elements of the rows that layers
    add up, of `dtype`."""
    # Multicast is not used here, and its set-up is what a rendezvous may hang in.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    votes = _Votes(group, device)
    made: list[SymmetricCommunicator] = []

    def make() -> bool:
        made.append(SymmetricCommunicator(group.comm, group.rank, group.size, hidden, dtype))
        return True

    def connect() -> bool:
        made[0].connect()
        made[0].prepare_test()
        return True

    steps: list[tuple[str, Callable[[], bool]]] = [
        ("the GPUs cannot write each other's memory", lambda: _peers_reachable(group)),
        ("torch's symmetric memory cannot be had", make),
        ("torch's symmetric memory cannot be shared", connect),
        ("a sum over it is wrong", lambda: made[0].test_few()),
    ]
    for reason, step in steps:
        if not votes.all_say_yes(step):
            return group, reason + votes.why
    if not votes.all_say_yes(lambda: made[0].test_many()):
        made[0].give_up_many()
    return TPGroup(group.rank, group.size, made[0]), ""


def _peers_reachable(group: TPGroup) -> bool:
    """Of a host's ranks, each of which has the GPU of its number."""
    if torch.cuda.device_count() < group.size:
        return False
    peers = [index for index in range(group.size) if index != group.rank]
    return all(torch.cuda.can_device_access_peer(group.rank, peer) for peer in peers)


class _Votes:
    """Steps that all ranks take together, and go on from only if all succeeded."""

    def __init__(self, group: TPGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.why = ""
        """What this rank's last step raised, in brackets."""

    def all_say_yes(self, step: Callable[[], bool]) -> bool:
        try:
            yes = step()
        except Exception as error:  # of torch, of Triton, of the driver: the way without is there
            yes, self.why = False, f" ({type(error).__name__}: {error})"
        ballot = torch.full((1,), int(yes), device=self._device)
        return int(self._group.comm.all_reduce(ballot)) == self._group.size
