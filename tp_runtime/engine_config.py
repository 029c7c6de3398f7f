"""Settings of one server, frozen after the command line is read.

Every process of a server (launcher, keepers, coordinator, workers) sees the same EngineConfig; it
travels as JSON. Nothing here needs torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tp_runtime.errors import ConfigError

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
SamplingPath = Literal["auto", "gather", "sharded"]
LoadFormat = Literal["auto", "dummy"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model` is a folder (or a hub name, resolved to a folder before the config is shared).

    Lengths and budgets are in tokens, times in seconds, memory as a fraction of the device."""

    model: str
    served_model_name: str = ""
    tensor_parallel_size: int = 1
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    load_format: LoadFormat = "auto"
    """dummy: random weights from `seed`, for benchmarks; only config.json is read."""
    max_model_len: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    """KV cache of one rank on a CPU, GiB, at most."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_requests: int = 4096
    enable_prefix_caching: bool = True
    run_ahead: int = 8
    sampling: SamplingPath = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    disable_prefill_graphs: bool = False
    compile: bool = False
    disable_custom_all_reduce: bool = False
    disable_product_tuning: bool = False
    check: bool = False
    seed: int = 0
    listen: str = ""
    """Client address (`tcp://host:port`, `ipc://path`); empty: a unix socket in the run folder."""
    start_timeout_s: float = 600.0
    step_deadline_s: float = 120.0
    drain_timeout_s: float = 30.0
    max_worker_restarts: int = 3
    restart_window_s: float = 300.0
    trace: str = ""

    def validate(self) -> None:
        """Raises ConfigError naming the flag, what was given and what is possible."""
        for flag, value, low, high in (
            ("--tensor-parallel-size", self.tensor_parallel_size, 1, 1024),
            ("--max-num-seqs", self.max_num_seqs, 1, 4096),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**24),
            ("--max-num-queued-requests", self.max_num_queued_requests, 1, 10**7),
            ("--run-ahead", self.run_ahead, 1, 64),
            ("--max-model-len", self.max_model_len, 1, 2**31 - 1),
            ("--block-size", self.block_size, 1, 4096),
            ("--num-kv-blocks", self.num_kv_blocks, 1, 2**31 - 1),
            ("--gpu-memory-utilization", self.gpu_memory_utilization, 0.05, 1.0),
            ("--max-worker-restarts", self.max_worker_restarts, 0, 10**6),
        ):
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag} {value} is out of range; give {low} to {high}.")
        if self.listen and not self.listen.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"--listen {self.listen!r} is not an address; give tcp://HOST:PORT or ipc://PATH."
            )

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineConfig:
        return msgspec.json.decode(text, type=cls)
