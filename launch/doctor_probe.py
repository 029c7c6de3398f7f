"""Programs that `tp-runtime doctor` runs as child processes; each prints one JSON object.

    python -m tp_runtime.launch.doctor_probe torch HEAD_SIZE DTYPE WINDOWS
    python -m tp_runtime.launch.doctor_probe copies
    python -m tp_runtime.launch.doctor_probe reduce BACKEND RANK RANKS STORE_FILE

What is printed are the types of doctor_facts. They may crash or hang; the doctor says so then.
"""

from __future__ import annotations

import datetime
import json
import sys
import time

import msgspec
import torch
import torch.distributed as dist

from tp_runtime.launch.doctor_facts import Backend, Copy, Gpu, Reduce, TorchFacts
from tp_runtime.ops.attention.registry import BACKENDS, choose_backend

_COPY_BYTES = 64 << 20
_REDUCE_ELEMENTS = 1 << 20
_REDUCE_TIMEOUT = datetime.timedelta(seconds=45)


def torch_facts(head_size: int, dtype: str, windows: list[int | None]) -> TorchFacts:
    """GPUs, versions, and the attention back-ends for heads of this size; dtype "auto" is what a
    server would take."""
    gpus, error = _gpus()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    if dtype == "auto":
        dtype = "bfloat16" if gpus else "float32"
    number: torch.dtype = getattr(torch, dtype)
    backends = [
        Backend(name, _reason(name, head_size, number, windows, device)) for name in BACKENDS
    ]
    usable = [backend.name for backend in backends if not backend.reason]
    return TorchFacts(
        cuda=torch.version.cuda or "",
        nccl=_nccl_version(),
        cuda_error=error,
        gpus=gpus,
        backends=backends,
        chosen=usable[0] if usable else "",
        dtype=dtype,
    )


def _gpus() -> tuple[list[Gpu], str]:
    if torch.version.cuda is None:
        return [], "this torch is a build without CUDA"
    try:
        torch.cuda.init()
        found = []
        for index in range(torch.cuda.device_count()):
            # Real work: a GPU can be listed and be unusable (too new for this torch, broken).
            ones = torch.ones(256, 256, device=f"cuda:{index}")
            if float((ones @ ones)[0, 0]) != 256.0:
                return [], f"GPU {index} multiplies wrongly"
            del ones
            free, total = torch.cuda.mem_get_info(index)
            capability = torch.cuda.get_device_capability(index)
            found.append(Gpu(torch.cuda.get_device_name(index), capability, total, free))
        return found, ""
    except Exception as error:
        return [], str(error).splitlines()[0]


def _nccl_version() -> str:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _reason(
    name: str, head_size: int, dtype: torch.dtype, windows: list[int | None], device: torch.device
) -> str:
    try:
        choose_backend(name, head_size, dtype, None, windows, device)
    except ValueError as error:
        return str(error).partition(": ")[2].partition(". Give")[0]
    return ""


def copies() -> list[Copy]:
    """From every GPU to every other one."""
    count = torch.cuda.device_count()
    return [_copy(a, b) for a in range(count) for b in range(count) if a != b]


def _copy(source: int, target: int) -> Copy:
    peer = torch.cuda.can_device_access_peer(source, target)
    generator = torch.Generator().manual_seed(source * 64 + target)
    data = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, generator=generator)
    there = data.to(f"cuda:{source}")
    arrived = torch.empty_like(there, device=f"cuda:{target}")
    arrived.copy_(there)
    right = bool(torch.equal(arrived.cpu(), data))
    torch.cuda.synchronize(target)
    started = time.perf_counter()
    arrived.copy_(there)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    return Copy(source, target, peer, right, _COPY_BYTES / (time.perf_counter() - started) / 1e9)


def reduce(backend: str, rank: int, ranks: int, store_file: str) -> Reduce:
    """One rank of an all-reduce whose sums are known; the whole numbers in it are exact."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store_file, ranks),
        rank=rank,
        world_size=ranks,
        timeout=_REDUCE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    base = (torch.arange(_REDUCE_ELEMENTS, device=device) % 97).float()
    seconds = 0.0
    for _ in range(2):  # the first one connects
        x = base * (rank + 1)
        _wait(device)
        started = time.perf_counter()
        dist.all_reduce(x)
        _wait(device)
        seconds = time.perf_counter() - started
    wrong = int((x != base * (ranks * (ranks + 1) // 2)).sum())
    dist.destroy_process_group()
    error = f"{wrong} of {_REDUCE_ELEMENTS} sums are wrong on rank {rank}" if wrong else ""
    return Reduce(backend, ranks, error, 4 * _REDUCE_ELEMENTS / seconds / 1e9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    what, *rest = arguments
    result: object
    if what == "torch":
        result = torch_facts(int(rest[0]), rest[1], json.loads(rest[2]))
    elif what == "copies":
        result = copies()
    else:
        result = reduce(rest[0], int(rest[1]), int(rest[2]), rest[3])
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
