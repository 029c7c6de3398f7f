"""Which attention back-end a model gets on a device: chosen once at start, named in the log."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.flash2 import FlashAttention2Backend
from tp_runtime.ops.attention.flash3 import FlashAttention3Backend
from tp_runtime.ops.attention.hopper import HopperBackend
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.attention.triton_backend import TritonBackend

BACKENDS: dict[str, type[AttentionBackend]] = {
    cls.name: cls
    for cls in (
        HopperBackend,
        FlashAttention3Backend,
        FlashAttention2Backend,
        TritonBackend,
        ReferenceBackend,
    )
}
"""By name, fastest first; `auto` takes the first that supports what is asked."""


def choose_backend(
    name: str,
    head_size: int,
    dtype: torch.dtype,
    block_size: int | None,
    windows: Iterable[int | None],
    device: torch.device,
) -> tuple[AttentionBackend, str]:
    """The back-end called `name`, or for "auto" the first of BACKENDS that can do it.

    `windows`: the sliding windows of the model's layers. block_size None: the back-end's default.
    Returns it with the reason for the choice, for the log. Raises ValueError for an unknown name,
    or one that cannot do what is asked, with the reason."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(
            f"There is no attention back-end {name!r}; give auto, {', '.join(BACKENDS)}."
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"A KV block size of {block_size} is not possible; give 1 or more.")
    distinct = set(windows) or {None}
    reasons: dict[str, str] = {}
    for known, cls in BACKENDS.items():
        if name not in ("auto", known):
            continue
        reason = _first_reason(cls, head_size, dtype, block_size, distinct, device)
        if reason is None:
            try:
                return cls(), _why(name, reasons)
            except Exception as error:  # built for another torch, most often
                reason = f"its package is installed and cannot be loaded ({error})"
        reasons[known] = reason
    others = [other for other in BACKENDS if other != name]
    raise ValueError(
        f"Attention back-end {name} cannot be used here: {reasons[name]}. "
        f"Give auto, or another of {', '.join(others)}."
    )


def _first_reason(
    cls: type[AttentionBackend],
    head_size: int,
    dtype: torch.dtype,
    block_size: int | None,
    windows: set[int | None],
    device: torch.device,
) -> str | None:
    reasons = (cls.supports(head_size, dtype, block_size, each, device) for each in windows)
    return next((reason for reason in reasons if reason is not None), None)


def _why(name: str, passed_over: dict[str, str]) -> str:
    if name != "auto":
        return "as asked"
    if not passed_over:
        return "the fastest there is"
    return "; ".join(f"not {other}: {reason}" for other, reason in passed_over.items())
