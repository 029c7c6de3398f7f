"""Memory that all GPUs of a host can write, and the communicator that uses it for small tensors.

The only file that touches torch's symmetric memory, whose interface is not stable
(`tests/gpu/test_symmetric.py` runs with the version at hand).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tp_runtime.ops.exchange_check import gathering_is_right, sums_are_right
from tp_runtime.ops.group import Communicator, TPGroup
from tp_runtime.ops.sum_way import ChooseWay, SumWay, choose_way, most_rows

if TYPE_CHECKING:
    from tp_runtime.ops.kernels.inboxes import Inboxes

_GATHERED_WORDS = 2048
_SELF_TEST_LOOKS = 1_000_000
"""Each takes about a microsecond: a self-test fails after a second or two."""


class SharedMemory:
    """Memory of this rank, zero at first, that the others of its group can write after `share`."""

    def __init__(self, words: int, device: torch.device) -> None:
        # Not torch.distributed._symmetric_memory, which calls the same: in torch 2.11 it imports
        # 550 modules, and a worker would do that after every fork.
        from torch._C._distributed_c10d import _SymmetricMemory

        self._memory = _SymmetricMemory
        self.tensor = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int64, device)
        self.tensor.zero_()
        self._handle: object = None

    def share(self) -> Tensor:
        """Collective; [ranks] int64: where each rank's memory is seen from here."""
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("there is no process group")
        handle = self._memory.rendezvous(self.tensor, world.group_name)
        self._handle = handle
        addresses = list(handle.buffer_ptrs)
        return torch.tensor(addresses, dtype=torch.int64, device=self.tensor.device)


def _processors(ranks: int) -> int:
    """Of the smallest of the GPUs that the ranks have, the first `ranks`: all find the same."""
    return min(
        torch.cuda.get_device_properties(index).multi_processor_count for index in range(ranks)
    )


@dataclass(frozen=True)
class _Sums:
    """The kernel of one way, and the inboxes it alone uses."""

    kernel: Callable[..., tuple[Tensor, Tensor]]
    inboxes: Inboxes


class SymmetricCommunicator:
    """`inner` for large tensors; own exchanges for rows of `hidden` elements of `dtype`, few
    enough, and for gathering a few bytes. Which way a sum goes, `choose` says (`ops.sum_way`).

    Not usable before `connect`; what works then, `test_first` and `test` say.
    Memory: with 4,096 elements of bfloat16 36 MB for two ranks (512 rows in one step), and no more
    for others: 24 MB for three, 18 for four, 14 for eight, of which two steps take 8.5."""

    def __init__(
        self,
        inner: Communicator,
        rank: int,
        size: int,
        hidden: int,
        dtype: torch.dtype,
        choose: ChooseWay = choose_way,
    ) -> None:
        # Triton is had with CUDA only.
        from tp_runtime.ops.kernels import inboxes, one_shot, summed_row, two_shot

        self.name = f"{inner.name} + symmetric memory"
        self._inner = inner
        self._one_shot, self._two_shot, self._new_inboxes = one_shot, two_shot, inboxes.Inboxes
        self._rank, self._size = rank, size
        self._hidden, self._dtype = hidden, dtype
        self._choose = choose
        self._sums: dict[SumWay, _Sums] = {}
        self._words = summed_row.words_of(hidden, dtype)
        self._device = torch.device("cuda", torch.cuda.current_device())
        total = sum(self._size_of(way, rows) for way, rows in self._rows().items())
        total += one_shot.one_shot_inbox_size(size, 1, _GATHERED_WORDS)
        self._memory: SharedMemory | None = SharedMemory(total, self._device)

    def _rows(self) -> dict[SumWay, int]:
        """The most rows that go each way, of those that any go."""
        most = {way: most_rows(self._choose, way, 4 * self._words, self._size) for way in SumWay}
        at_once = self._two_shot.two_shot_rows(self._words, _processors(self._size))
        most[SumWay.TWO_SHOT] = min(most[SumWay.TWO_SHOT], at_once)
        return {way: rows for way, rows in most.items() if rows > 0}

    def _size_of(self, way: SumWay, rows: int) -> int:
        if way is SumWay.TWO_SHOT:
            return self._two_shot.two_shot_inbox_size(self._size, rows, self._words)
        return self._one_shot.one_shot_inbox_size(self._size, rows, self._words)

    def connect(self) -> None:
        """Collective. Raises RuntimeError when the memory cannot be shared."""
        if self._memory is None:
            raise RuntimeError("the communicator is closed")
        base = self._memory.share()
        for way, rows in self._rows().items():
            inboxes = self._inboxes(base, rows, self._words)
            if way is SumWay.TWO_SHOT:
                self._sums[way] = _Sums(self._two_shot.two_shot_all_reduce, inboxes)
            else:
                inboxes = replace(inboxes, flagged=way is SumWay.FLAGS)
                self._sums[way] = _Sums(self._one_shot.one_shot_all_reduce, inboxes)
            base = base + 8 * self._size_of(way, rows)
        self._small = self._inboxes(base, 1, _GATHERED_WORDS)

    def _inboxes(self, addresses: Tensor, rows: int, words: int) -> Inboxes:
        turns = torch.zeros(rows, dtype=torch.int32, device=self._device)
        return self._new_inboxes(self._rank, self._size, rows, words, addresses, turns)

    # ------------------------------------------------------------ Communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        sums = self._sums_for(x)
        return self._inner.all_reduce(x) if sums is None else sums.kernel(x, sums.inboxes)[0]

    def _sums_for(self, x: Tensor) -> _Sums | None:
        if x.dim() != 2 or x.shape[1] != self._hidden or x.dtype != self._dtype:
            return None
        way = self._choose(x.shape[0], 4 * self._words, self._size)
        sums = None if way is None else self._sums.get(way)
        fits = sums is not None and x.shape[0] <= sums.inboxes.rows
        return sums if fits and x.is_cuda and x.is_contiguous() else None

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        return self._inner.begin_all_reduce(x)

    def sums_in_parts(self, rows: int) -> int:
        return self._inner.sums_in_parts(rows)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        sums = self._sums_for(x)
        if sums is None:
            return None
        return sums.kernel(x, sums.inboxes, norm=weight, eps=eps, residual=residual)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        small = x.nbytes <= 4 * _GATHERED_WORDS and x.nbytes % 4 == 0
        if not (small and x.is_cuda and x.is_contiguous()):
            return self._inner.all_gather(x)
        return list(self._one_shot.one_shot_all_gather(x, self._small).unbind(0))

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

    @property
    def ways(self) -> list[SumWay]:
        """In which sums are made, from the fewest rows to the most."""
        return list(self._sums)

    def prepare_test(self) -> None:
        """Collective. Does what the tests do without waiting for anybody, as compiling may take one
        rank seconds longer than another. It leaves no trace."""
        for sums in self._sums.values():
            sums_are_right(sums.kernel, replace(sums.inboxes, patience=1), self._dtype, turns=1)
        gathering_is_right(self._one_shot.one_shot_all_gather, replace(self._small, patience=1))
        self.barrier()
        if self._memory is not None:
            self._memory.tensor.zero_()
        for inboxes in (self._small, *(sums.inboxes for sums in self._sums.values())):
            inboxes.turns.zero_()
        self.barrier()

    def test_first(self) -> bool:
        """Collective. Whether gathering and sums of the fewest rows come out right. Never waits for
        long."""
        right = not self._sums or self.test(self.ways[0])
        small = replace(self._small, patience=_SELF_TEST_LOOKS)
        return gathering_is_right(self._one_shot.one_shot_all_gather, small) and right

    def test(self, way: SumWay) -> bool:
        """Collective. The same for the sums of one way."""
        sums = self._sums[way]
        patient = replace(sums.inboxes, patience=_SELF_TEST_LOOKS)
        return sums_are_right(sums.kernel, patient, self._dtype)

    def give_up(self, way: SumWay) -> None:
        """Sums that would go this way are NCCL's from now on."""
        del self._sums[way]


def with_symmetric_memory(
    group: TPGroup,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    choose: ChooseWay = choose_way,
) -> tuple[TPGroup, str]:
    """Collective, for ranks of one host on CUDA. The group with exchanges of its own, or the group
    as it is with the reason why; every rank gets the same. `hidden`: elements of the rows that
    layers add up, of `dtype`. `choose`: which way each sum goes; a way that its test finds wrong is
    not gone."""
    # Multicast is not used here, and its set-up is what a rendezvous may hang in.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    votes = _Votes(group, device)
    made: list[SymmetricCommunicator] = []

    def make() -> bool:
        place = (group.rank, group.size)
        made.append(SymmetricCommunicator(group.comm, *place, hidden, dtype, choose))
        return True

    def connect() -> bool:
        made[0].connect()
        made[0].prepare_test()
        return True

    steps: list[tuple[str, Callable[[], bool]]] = [
        ("the GPUs cannot write each other's memory", lambda: _peers_reachable(group)),
        ("torch's symmetric memory cannot be had", make),
        ("torch's symmetric memory cannot be shared", connect),
        ("a sum over it is wrong", lambda: made[0].test_first()),
    ]
    for reason, step in steps:
        if not votes.all_say_yes(step):
            return group, reason + votes.why
    for way in made[0].ways[1:]:
        if not votes.all_say_yes(partial(made[0].test, way)):
            made[0].give_up(way)
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
        return self._group.all_say_yes(yes, self._device)
