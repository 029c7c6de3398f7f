"""What the doctor says about a model: what it is, and how much of it fits where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tp_runtime.checkpoint_files import find_checkpoint, read_header
from tp_runtime.errors import ConfigError, TPRuntimeError
from tp_runtime.launch.doctor_checks import Finding
from tp_runtime.launch.doctor_facts import MachineFacts
from tp_runtime.launch.model_memory import DTYPE_BYTES, RankMemory, rank_memory
from tp_runtime.model_config import ModelConfig
from tp_runtime.text.tokenizer_files import has_tokenizer, read_chat_templates, read_settings

GIB = 1 << 30
SIZES = (1, 2, 4, 8)
TYPICAL_DEVICES = (24 * GIB, 80 * GIB, 141 * GIB)
"""Where there is no GPU to ask."""


def size_text(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def number_format(asked: str, model: ModelConfig) -> str:
    """As a server chooses it: the checkpoint's own on a GPU. Without one the answer is about GPUs
    that are elsewhere, so it is the same."""
    if asked != "auto":
        return asked
    return model.dtype if model.dtype in DTYPE_BYTES else "bfloat16"


def describe(model: ModelConfig) -> list[Finding]:
    """Architecture and sizes in two sentences."""
    windows = {window for window in model.windows if window is not None}
    parts = [
        f"{model.num_layers} layers of {model.hidden_size}",
        f"{model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}",
        f"vocabulary {model.vocab_size:,}",
        f"{model.max_position:,} positions (rotary: {model.rope.type})",
    ]
    if windows:
        parts.append(f"sliding window {', '.join(map(str, sorted(windows)))}")
    count = model.num_parameters
    shown = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
    tied = ", embedding and head tied" if model.tie_word_embeddings else ""
    found = [
        Finding("fine", f"{model.architecture}, {shown} parameters in {model.dtype}{tied}."),
        Finding("fine", ", ".join(parts) + "."),
    ]
    if model.ignored_fields:
        named = ", ".join(model.ignored_fields)
        found.append(Finding("note", f"Fields of config.json that mean nothing here: {named}."))
    return found


def check_files(folder: Path) -> list[Finding]:
    """Weights and tokenizer, as far as their headers tell."""
    found = []
    try:
        files = find_checkpoint(folder).files
        for file in files:
            read_header(file)
        size = sum(file.stat().st_size for file in files)
        noun = "file" if len(files) == 1 else "files"
        found.append(Finding("fine", f"{size_text(size)} of weights in {len(files)} {noun}."))
    except TPRuntimeError as error:
        found.append(Finding("wrong", str(error)))
    if not has_tokenizer(folder):
        found.append(
            Finding("note", "There is no tokenizer; only token ids can be given as prompts.")
        )
        return found
    try:
        templates = read_chat_templates(folder, read_settings(folder))
    except ConfigError as error:
        return [*found, Finding("wrong", str(error))]
    chat = "a chat template" if templates else "no chat template (a base model: use generate)"
    found.append(Finding("fine", f"It has a tokenizer and {chat}."))
    return found


def memory_table(
    model: ModelConfig, dtype: str, devices: Sequence[int], sizes: Sequence[int] = SIZES
) -> list[str]:
    """Lines: per tensor-parallel size the fullest rank's weights, KV cache per 1,000 tokens, and
    the longest context on devices of so many bytes, 90 % of which may be used."""
    headings = ["ranks", "weights", "KV / 1k tokens", "largest step"]
    headings += [f"context on {device / GIB:.0f} GB" for device in devices]
    rows = [headings]
    for size in sizes:
        if size > model.num_heads:
            rows.append([str(size), f"not possible: {model.num_heads} query heads"])
            continue
        memory = rank_memory(model, size, DTYPE_BYTES[dtype])
        rows.append(
            [
                str(size),
                size_text(memory.weights),
                size_text(memory.kv_per_token * 1000),
                f"~{memory.work / GIB:.1f} GiB",
                *(_context(memory, device, model) for device in devices),
            ]
        )
    widths = [
        max(len(row[i]) for row in rows if len(row) == len(headings)) for i in range(len(headings))
    ]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]


def _context(memory: RankMemory, device: int, model: ModelConfig) -> str:
    tokens = memory.cache_tokens(device)
    if not tokens:
        return "does not fit"
    return f"{min(tokens, model.max_position):,}" + (
        " (all)" if tokens >= model.max_position else ""
    )


def check_fit(model: ModelConfig, dtype: str, facts: MachineFacts) -> list[Finding]:
    """Whether the GPUs seen can hold it, and with how few ranks."""
    itemsize = DTYPE_BYTES[dtype]
    gpus = facts.torch.gpus
    if not gpus:
        need = rank_memory(model, 1, DTYPE_BYTES["float32"]).weights
        if need > facts.limits.memory_free:
            return [
                Finding(
                    "wrong",
                    f"In float32 on the CPU the weights take {need / GIB:.1f} GiB, and "
                    f"{facts.limits.memory_free / GIB:.1f} GiB of memory are free.",
                    "Use a smaller model, --dtype bfloat16, or a machine with a GPU.",
                )
            ]
        return [Finding("fine", f"In float32 on the CPU the weights take {size_text(need)}.")]
    device = min(gpu.free for gpu in gpus)
    for size in range(1, min(len(gpus), model.num_heads) + 1):
        tokens = rank_memory(model, size, itemsize).cache_tokens(device)
        if tokens:
            noun = "GPU" if size == 1 else "GPUs"
            return [
                Finding(
                    "fine",
                    f"In {dtype} it fits on {size} {noun} of this host, with room for about "
                    f"{tokens:,} tokens of KV cache.",
                )
            ]
    return [
        Finding(
            "wrong",
            f"In {dtype} it does not fit on the {len(gpus)} GPUs of this host "
            f"({device / GIB:.0f} GiB free on the fullest).",
            "Use more GPUs, a smaller model, or free memory that other programs hold.",
        )
    ]
