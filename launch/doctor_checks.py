"""From facts to findings: what is fine, what is worth knowing, what is wrong and what to do.

Pure functions of what doctor_facts holds. A finding is wrong when a server cannot work because of
it, or would compute wrongly; everything that is only slower or unusual is a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tp_runtime.launch.doctor_facts import PACKAGES, MachineFacts

GIB = 1 << 30
MIB = 1 << 20
_OLDEST_PYTHON = (3, 11)
_FEW_FILES = 1024
"""A server holds a descriptor per client and a few dozen of its own."""
_FEW_PROCESSES = 512
"""Threads count: torch starts one per core and rank, and a few more."""
_SMALL_SHM = 64 * MIB
"""NCCL takes about 10 MB per rank of it between GPUs without a direct way. Containers have 64 MB
unless told otherwise; the runtime itself needs none."""
_LITTLE_LOCKED = 64 * MIB
_OLDEST_CAPABILITY = (8, 0)
_NVLINK_GB_PER_S = 60.0
"""Above what PCIe 5.0 x16 carries."""

Level = Literal["fine", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """`text` is a sentence; `advice`, where there is something to do, another one."""

    level: Level
    text: str
    advice: str = ""


def check_machine(facts: MachineFacts) -> dict[str, list[Finding]]:
    """All findings, by the heading they belong under."""
    return {
        "Versions": check_versions(facts),
        "GPUs": check_gpus(facts),
        "Between the ranks": [*check_copies(facts), *check_reduce(facts)],
        "Attention": check_attention(facts),
        "Limits": check_limits(facts),
    }


def is_broken(findings: dict[str, list[Finding]]) -> bool:
    return any(each.level == "wrong" for group in findings.values() for each in group)


def check_versions(facts: MachineFacts) -> list[Finding]:
    found = []
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    if version < _OLDEST_PYTHON:
        found.append(
            Finding("wrong", f"Python {facts.python} is too old.", "Use Python 3.11 or 3.12.")
        )
    else:
        found.append(Finding("fine", f"Python {facts.python} on {facts.system}."))
    named = [f"{name} {facts.packages[name]}" for name in PACKAGES if facts.packages.get(name)]
    found.append(Finding("fine", ", ".join(named) + "."))
    missing = [name for name in PACKAGES if not facts.packages.get(name)]
    for name in missing:
        level: Level = "note" if name in ("triton", "tp_runtime") else "wrong"
        text, advice = f"{name} is not installed.", f"Install it: pip install {name}"
        if name == "tp_runtime":
            text, advice = "tp_runtime runs from a checkout and is not installed.", ""
        elif name == "triton" and facts.torch.gpus:
            level = "wrong"  # the kernels on a GPU are Triton's
        found.append(Finding(level, text, advice))
    if facts.torch_error and facts.packages.get("torch"):
        found.append(
            Finding(
                "wrong",
                f"torch cannot be imported: {facts.torch_error}.",
                "Install a torch that fits this Python and driver (https://pytorch.org).",
            )
        )
    elif not facts.torch_error:
        cuda = f"CUDA {facts.torch.cuda}" if facts.torch.cuda else "without CUDA"
        nccl = f", NCCL {facts.torch.nccl}" if facts.torch.nccl else ""
        driver = f", driver {facts.driver}" if facts.driver else ""
        found.append(Finding("fine", f"torch was built {cuda}{nccl}{driver}."))
    return found


def check_gpus(facts: MachineFacts) -> list[Finding]:
    if facts.gpu_error:
        return [Finding("wrong", facts.gpu_error)]
    if not facts.present:
        return [Finding("note", "There is no NVIDIA GPU here; models run on the CPU, slowly.")]
    mask = "not set" if facts.mask is None else repr(facts.mask)
    if not facts.visible:
        return [
            Finding(
                "note",
                f"{_count(facts.present, 'GPU')} in this host, none visible "
                f"(CUDA_VISIBLE_DEVICES is {mask}); models run on the CPU.",
                "Change CUDA_VISIBLE_DEVICES if that is not meant.",
            )
        ]
    if facts.torch_error:
        return []  # told already
    if not facts.torch.gpus:
        why = facts.torch.cuda_error or "it gives no reason"
        return [
            Finding(
                "wrong",
                f"{_count(facts.visible, 'GPU')} visible, and torch cannot use any: {why}.",
                "Install torch with CUDA (https://pytorch.org), or a newer driver for it.",
            )
        ]
    return [finding for index in range(len(facts.torch.gpus)) for finding in _gpu(facts, index)]


def _gpu(facts: MachineFacts, index: int) -> list[Finding]:
    gpu = facts.torch.gpus[index]
    major, minor = gpu.capability
    found = [
        Finding(
            "fine",
            f"GPU {index}: {gpu.name}, compute capability {major}.{minor}, "
            f"{gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free.",
        )
    ]
    if gpu.free < 0.8 * gpu.total:
        found.append(
            Finding(
                "note",
                f"Other programs hold {(gpu.total - gpu.free) / GIB:.1f} GiB of GPU {index}.",
                "nvidia-smi names them; a server takes only what is free.",
            )
        )
    if gpu.capability < _OLDEST_CAPABILITY:
        found.append(
            Finding(
                "note",
                f"GPU {index} is older than Ampere (8.0) and has no fast bfloat16.",
                "Give --dtype float16.",
            )
        )
    return found


def check_copies(facts: MachineFacts) -> list[Finding]:
    if facts.copy_error:
        return [
            Finding(
                "wrong",
                f"Copying between the GPUs failed: {facts.copy_error}.",
                "Try NCCL_P2P_DISABLE=1; in a virtual machine switch off ACS (IOMMU) for the GPUs.",
            )
        ]
    if not facts.copies:
        return []
    wrong = [f"{copy.source} to {copy.target}" for copy in facts.copies if not copy.right]
    if wrong:
        return [
            Finding(
                "wrong",
                f"Data copied from GPU {', '.join(wrong)} arrived changed.",
                "Direct copies are broken here, most often by the IOMMU: switch off ACS, or set "
                "NCCL_P2P_DISABLE=1.",
            )
        ]
    slowest = min(facts.copies, key=lambda copy: copy.gb_per_s)
    rate = f"at least {slowest.gb_per_s:.0f} GB/s, GPU {slowest.source} to {slowest.target}"
    through_host = [copy for copy in facts.copies if not copy.peer]
    if through_host:
        return [
            Finding(
                "note",
                f"{len(through_host)} of {len(facts.copies)} pairs of GPUs have no direct way to "
                f"each other ({rate}); every all-reduce goes through main memory.",
                "Tensor parallelism will be slow; use GPUs with NVLink or on one PCIe switch.",
            )
        ]
    how = "NVLink" if slowest.gb_per_s > _NVLINK_GB_PER_S else "PCIe, by the speed"
    return [Finding("fine", f"Every GPU copies to every other one directly ({how}; {rate}).")]


def check_reduce(facts: MachineFacts) -> list[Finding]:
    reduce = facts.reduce
    if reduce is None:
        return []
    where = "over loopback" if reduce.backend == "gloo" else "over the GPUs"
    if reduce.error:
        advice = "Set NCCL_DEBUG=INFO and run the doctor again to see more."
        if reduce.backend == "gloo":
            advice = "Check that the interface lo is up and that nothing filters it."
        elif facts.limits.shm_free < _SMALL_SHM:
            advice = "NCCL needs /dev/shm here: give the container --shm-size=1g (or --ipc=host)."
        return [
            Finding(
                "wrong",
                f"An all-reduce of {reduce.ranks} ranks with {reduce.backend} {where} failed: "
                f"{reduce.error}.",
                advice,
            )
        ]
    return [
        Finding(
            "fine",
            f"An all-reduce with data over {_count(reduce.ranks, 'rank')} ({reduce.backend}, "
            f"{where}) gave the right sums.",
        )
    ]


def check_attention(facts: MachineFacts) -> list[Finding]:
    torch = facts.torch
    if facts.torch_error or not torch.backends:
        return []
    if not torch.chosen:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in torch.backends)
        return [Finding("wrong", f"No attention back-end can be used: {reasons}.")]
    found = [Finding("fine", f"{torch.chosen} is chosen, for {torch.dtype}.")]
    for backend in torch.backends:
        if backend.name == torch.chosen:
            break  # the following ones are slower
        advice = _HOW_TO_GET.get(backend.name, "") if "not installed" in backend.reason else ""
        found.append(Finding("note", f"Not {backend.name}: {backend.reason}.", advice))
    return found if torch.gpus else found[:1]


_HOW_TO_GET = {
    "flash-attn-3": "It is the fastest on Hopper: build the folder hopper/ of "
    "github.com/Dao-AILab/flash-attention (python setup.py install) for this torch.",
    "flash-attn-2": "pip install flash-attn --no-build-isolation (compiles with nvcc of torch's "
    "CUDA).",
}


def check_limits(facts: MachineFacts) -> list[Finding]:
    limits = facts.limits
    found = [
        Finding(
            "fine",
            f"{_count(limits.cores, 'core')}, {limits.memory_free / GIB:.1f} of "
            f"{limits.memory / GIB:.1f} GiB of memory free.",
        )
    ]
    sizes = f"{limits.shm_free / MIB:.0f} of {limits.shm_total / MIB:.0f} MiB free"
    if limits.shm_free < _SMALL_SHM and len(facts.torch.gpus) > 1:
        through_host = any(not copy.peer for copy in facts.copies)
        found.append(
            Finding(
                "wrong" if through_host else "note",
                f"/dev/shm is small ({sizes}), and NCCL uses it between GPUs without a direct way.",
                "Give the container --shm-size=1g (or --ipc=host).",
            )
        )
    else:
        found.append(Finding("fine", f"/dev/shm: {sizes}."))
    for name, what, value, least in (
        ("nofile", "open files", limits.nofile, _FEW_FILES),
        ("nproc", "processes and threads", limits.nproc, _FEW_PROCESSES),
    ):
        if 0 <= value < least:
            found.append(
                Finding(
                    "wrong",
                    f"Only {value} {what} are allowed (ulimit, {name}); a server may need {least}.",
                    f"Raise it: ulimit -{'n' if name == 'nofile' else 'u'} {least * 4}",
                )
            )
        else:
            found.append(Finding("fine", f"{name}: {_amount(value)} {what}."))
    locked = limits.memlock
    shown = "no limit" if locked < 0 else f"{locked / MIB:.0f} MiB"
    if 0 <= locked < _LITTLE_LOCKED and facts.torch.gpus:
        advice = "Enough on one host; InfiniBand between hosts needs ulimit -l unlimited."
        found.append(Finding("note", f"memlock: {shown} of locked memory.", advice))
    else:
        found.append(Finding("fine", f"memlock: {shown} of locked memory."))
    return found


def _amount(value: int) -> str:
    return "any number of" if value < 0 else f"{value}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
