"""The flags that describe a server, the same for every command; from them an EngineConfig.

There is one option per field of EngineConfig, named as in vLLM where that has it. Defaults and
types are read from the struct, so a flag cannot differ from the field it sets.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from tp_runtime.engine_config import EngineConfig

F = TypeVar("F", bound=Callable[..., Any])

_NAMES: dict[str, tuple[str, ...]] = {
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp"),
    "enable_prefix_caching": ("--enable-prefix-caching/--no-enable-prefix-caching",),
    "start_timeout_s": ("--start-timeout",),
    "step_deadline_s": ("--step-deadline",),
    "drain_timeout_s": ("--drain-timeout",),
    "restart_window_s": ("--restart-window",),
}
"""Where the flag is not simply the field's name."""

_HELP: dict[str, str] = {
    "served_model_name": "Name shown to clients; the model's own name if not given.",
    "tensor_parallel_size": "Number of ranks, one worker process (and GPU) each.",
    "device": "auto: cuda when a GPU is visible, cpu otherwise.",
    "dtype": "auto: the checkpoint's own on a GPU, float32 on a CPU.",
    "load_format": "dummy: random weights from --seed; only config.json is read.",
    "max_model_len": "Most tokens of one sequence; the model's own limit if not given.",
    "block_size": "Tokens per KV-cache block; chosen by the attention back-end if not given.",
    "num_kv_blocks": "KV-cache blocks per rank; from the memory that is free if not given.",
    "gpu_memory_utilization": "Fraction of each GPU's memory that may be used.",
    "cpu_kv_cache_gib": "KV cache of one rank on a CPU, GiB.",
    "max_num_seqs": "Most sequences that run at the same time.",
    "max_num_batched_tokens": "Most tokens of one step.",
    "max_num_queued_requests": "Most requests waiting; more are refused.",
    "enable_prefix_caching": "Reuse the KV cache of equal beginnings.",
    "run_ahead": "Most steps published and not yet answered; 1 waits for each.",
    "sampling": "How ranks agree on a token; gather: rank 0 sees all logits.",
    "attention_backend": "auto, or the name of a back-end.",
    "enforce_eager": "No CUDA graphs.",
    "disable_prefill_graphs": "CUDA graphs of decode steps alone, none of steps with prompts.",
    "disable_custom_all_reduce": "Add over the ranks by NCCL alone, not over symmetric memory.",
    "disable_product_tuning": "Take cuBLAS's first choice for every matrix product, untimed.",
    "compile": "Run small operators under torch.compile in place of the own kernels.",
    "check": "Compare the ranks' states at every step.",
    "seed": "For random weights, and for requests without a seed of their own.",
    "listen": "Client address, tcp://HOST:PORT or ipc://PATH; a unix socket if not given.",
    "start_timeout_s": "Seconds until a server that is not ready counts as failed.",
    "step_deadline_s": "Seconds until a step without an answer counts as hung.",
    "drain_timeout_s": "Seconds that running requests get to finish after SIGTERM.",
    "max_worker_restarts": "Worker restarts within --restart-window before giving up.",
    "restart_window_s": "Seconds over which worker restarts are counted.",
    "trace": "Write a trace of the steps to this file.",
}


def engine_options(function: F) -> F:
    """Decorator: one option per EngineConfig field except `model`."""
    for field in reversed(msgspec.structs.fields(EngineConfig)):
        if field.name != "model":
            function = _option(field)(function)
    return function


def _option(field: msgspec.structs.FieldInfo) -> Callable[[F], F]:
    names = _NAMES.get(field.name, ("--" + field.name.replace("_", "-"),))
    kind = field.type
    settings: dict[str, Any] = {"default": field.default, "help": _HELP.get(field.name, "")}
    if kind is bool:
        settings["is_flag"] = True
    elif typing.get_origin(kind) is typing.Literal:
        settings["type"] = click.Choice(typing.get_args(kind))
    elif isinstance(kind, types.UnionType):  # X | None
        settings["type"] = next(t for t in typing.get_args(kind) if t is not type(None))
    else:
        settings["type"] = kind
    if field.default not in (None, "", False) or kind is int:
        settings["show_default"] = True
    return click.option(*names, field.name, **settings)


def engine_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """The config for the flags given, checked as far as that needs no model.

    Raises ConfigError naming the flag, what was given and what is possible."""
    config = EngineConfig(model=model, **options)
    config.validate()
    return config


def take_engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Move the engine's options out of a command's keyword arguments."""
    names = {field.name for field in msgspec.structs.fields(EngineConfig)} - {"model"}
    return {name: options.pop(name) for name in names & options.keys()}
