"""A worker process: one rank, one device, one shard of the model.

`run_worker` is called in a freshly forked child of the keeper and never returns. Its life: join the
process group, build and load the shard, say how much cache fits, allocate what the coordinator
decides, then take plans from the ring until told to stop. Any exception ends the process after a
report: a worker that goes on after an exception would be out of step with the others.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import traceback
from typing import NoReturn

import torch

from tp_runtime.engine_config import EngineConfig
from tp_runtime.errors import TPRuntimeError
from tp_runtime.messages import (
    AllocateKV,
    WorkerFailed,
    WorkerLoaded,
    WorkerProgress,
    WorkerReady,
)
from tp_runtime.model_config import ModelConfig
from tp_runtime.model_length import resolve_max_model_len
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.metadata import LayerKV
from tp_runtime.ops.attention.registry import choose_backend
from tp_runtime.ops.compiled import compile_references
from tp_runtime.ops.group import TPGroup
from tp_runtime.ops.symmetric import with_symmetric_memory
from tp_runtime.transport.fd_socket import FdSocket
from tp_runtime.transport.heartbeat import Heartbeat, Phase
from tp_runtime.transport.ring import RingReader, RingWriter
from tp_runtime.transport.trace_area import TraceArea
from tp_runtime.transport.worker_fds import WorkerDescriptors
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.decode_graphs import DecodeGraphs, first_sizes, graph_sizes
from tp_runtime.workers.device import choose_device, choose_dtype, join_group
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.kv_cache import KVGeometry, MemoryBefore, max_blocks
from tp_runtime.workers.later_graphs import LaterGraphs
from tp_runtime.workers.loader import count_parameters, fill_dummy, load_weights, model_digest
from tp_runtime.workers.loop import WorkerLoop
from tp_runtime.workers.models.decoder import CausalLM
from tp_runtime.workers.models.registry import build_model
from tp_runtime.workers.prefill_check import record_prefills
from tp_runtime.workers.prefill_graphs import PrefillGraphs, rooms_for
from tp_runtime.workers.runner import Runner
from tp_runtime.workers.sampler import Sampler
from tp_runtime.workers.sharded_sampler import ShardedSampler
from tp_runtime.workers.start_clock import StartClock
from tp_runtime.workers.step_trace import StepTrace
from tp_runtime.workers.tune_products import tune_products
from tp_runtime.workers.warm_up import warm_up

logger = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30
"""Kept free for graphs: what one step allocates, their kernels' arguments (a MiB or two each), the
workspaces of libraries on their stream. Estimated."""


class Worker:
    """What a rank builds up on its way to READY."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        local_rank: int,
        world_size: int,
        generation: int,
        fds: WorkerDescriptors,
    ) -> None:
        self.config = config
        self.rank, self.local_rank = rank, local_rank
        self.world_size = world_size
        self.generation = generation
        self.status: FdSocket[AllocateKV] = FdSocket(socket.socket(fileno=fds.status), AllocateKV)
        self.heartbeat = Heartbeat(fds.heartbeat)
        self.plans = RingReader(fds.plan_ring, fds.plan_doorbell, local_rank)
        self.answers = RingWriter(fds.answer_ring, [fds.answer_doorbell]) if rank == 0 else None
        self.phase = Phase.START
        self.step = 0
        self.clock = StartClock("device")

    def enter(self, phase: Phase, step: int = 0) -> None:
        self.phase, self.step = phase, step
        self.heartbeat.beat(self.local_rank, step, phase)

    def run(self) -> None:
        """The whole life; returns after an orderly Stop."""
        self.enter(Phase.INIT)
        device = choose_device(self.config, self.local_rank)
        before = MemoryBefore.measure(device)
        self.clock.enter("ranks meet")
        group = join_group(
            device, self.rank, self.world_size, self.generation, self.config.start_timeout_s
        )
        if self.config.compile:
            compile_references()
        runner = self._build(device, group, before)
        gc.collect()
        gc.freeze()  # the model's objects never die; the collector need not look at them again
        graphs, later = runner.graphs, runner.later_graphs
        sizes = [] if graphs is None else list(graphs.sizes)
        left = 0 if later is None else len(later)
        self.status.send(WorkerReady(self.rank, sizes, left, self.clock.stop()))
        trace = None
        if self.config.trace:
            trace = StepTrace(TraceArea.of_rank(self.heartbeat.fd, self.local_rank), device)
        loop = WorkerLoop(runner, self.plans, self.answers, self.generation, self.enter, trace)
        loop.run()
        self.enter(Phase.STOP)
        if graphs is not None:
            graphs.release()
        if runner.prefill_graphs is not None:
            runner.prefill_graphs.release()
        runner.group.comm.close()

    def _build(self, device: torch.device, group: TPGroup, before: MemoryBefore) -> Runner:
        self.enter(Phase.LOAD)
        self.clock.enter("model")
        config, model_config = self.config, ModelConfig.from_folder(self.config.model)
        dtype = choose_dtype(config, model_config, device)
        max_model_len = resolve_max_model_len(config, model_config)
        self.clock.enter("symmetric memory")
        group = self._with_symmetric_memory(group, model_config.hidden_size, dtype, device)
        self.clock.enter("model")
        backend, reason = choose_backend(
            config.attention_backend,
            head_size=model_config.head_dim,
            dtype=dtype,
            block_size=config.block_size,
            windows=model_config.windows,
            device=device,
        )
        model = build_model(model_config, group, dtype, device, backend, max_model_len)
        self.clock.enter("weights")
        if config.load_format == "dummy":
            fill_dummy(model, config.seed)
        else:
            load_weights(model, config.model, progress=self._progress if self.rank == 0 else None)
        model.eval()
        block_size = config.block_size or backend.default_block_size()
        geometry = KVGeometry.of(model_config, group, block_size, dtype)
        per_row = -(-max_model_len // block_size)
        self.enter(Phase.WARM_UP)
        self.clock.enter("tuning")
        self._tune_products(model, dtype, device)
        self.clock.enter("warm-up")
        peak = warm_up(model, geometry, config, max_model_len, device)
        self.status.send(
            WorkerLoaded(
                rank=self.rank,
                digest=model_digest(model_config, max_model_len, dtype),
                num_parameters=count_parameters(model),
                max_kv_blocks=max_blocks(
                    config,
                    geometry,
                    device,
                    before,
                    peak,
                    self._graph_bytes(model, backend, device),
                    config.max_num_seqs * per_row,
                ),
                block_size=block_size,
                kv_block_bytes=geometry.block_bytes,
                attention_backend=f"{backend.name} ({reason})",
            )
        )
        self.clock.enter("other ranks")
        allocate = self._await_allocation()
        self.clock.enter("cache")
        state = BatchState(
            config.max_num_seqs, per_row, block_size, model_config.vocab_size, device
        )
        kv = geometry.allocate(allocate.num_blocks, device)
        sampler = self._sampler(group, model)
        self.clock.enter("graphs")
        graphs = self._record_graphs(model, kv, state, sampler, backend)
        prefill_graphs = self._record_prefill_graphs(
            model, kv, state, group, backend, max_model_len
        )
        later = self._later_graphs(group, device, graphs, prefill_graphs)
        return Runner(model, kv, state, sampler, group, graphs, prefill_graphs, later)

    def _with_symmetric_memory(
        self, group: TPGroup, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> TPGroup:
        """With small sums over memory that all GPUs of the host can write, where that works."""
        one_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)) == self.world_size
        if group.size == 1 or device.type != "cuda" or not one_host:
            return group
        if self.config.disable_custom_all_reduce:
            return group
        fast, reason = with_symmetric_memory(group, hidden, dtype, device)
        if reason and self.rank == 0:
            logger.warning("tp_runtime: Sums over the ranks are made by NCCL alone: %s.", reason)
        return fast

    def _tune_products(self, model: CausalLM, dtype: torch.dtype, device: torch.device) -> None:
        """No rank waits for another here. Whatever stays allocated is there when the memory for the
        cache is measured."""
        if self.config.disable_product_tuning:
            return
        first = self.rank == 0
        tune_products(
            model,
            self.config,
            dtype,
            device,
            beat=lambda: self.enter(Phase.WARM_UP),
            say=self._say_tuning if first else lambda text: None,
            log=first,
        )

    def _sampler(self, group: TPGroup, model: CausalLM) -> Sampler:
        if self.config.sampling == "gather":
            return GatherSampler(group, model.lm_head)
        return ShardedSampler(group, model.lm_head)

    def _record_graphs(
        self,
        model: CausalLM,
        kv: list[LayerKV],
        state: BatchState,
        sampler: Sampler,
        backend: AttentionBackend,
    ) -> DecodeGraphs | None:
        if not self._can_record(state.device, backend):
            return None
        graphs = DecodeGraphs(model, kv, state, sampler, graph_sizes(self.config.max_num_seqs))
        for size in first_sizes(graphs.sizes):
            graphs.record(size)
        return graphs

    def _record_prefill_graphs(
        self,
        model: CausalLM,
        kv: list[LayerKV],
        state: BatchState,
        group: TPGroup,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> PrefillGraphs | None:
        """The first of them. None where they are not wanted or cannot be had, or, and then the log
        says so, where they do not do what they should."""
        rooms = rooms_for(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        if (
            self.config.disable_prefill_graphs
            or not self._can_record(state.device, backend)
            or not rooms
        ):
            return None
        graphs, wrong = record_prefills(model, kv, state, group, rooms, max_model_len)
        if wrong and self.rank == 0:
            logger.warning(
                "tp_runtime: Steps with prompts run without graphs: %s "
                "(--disable-prefill-graphs does not try).",
                wrong,
            )
        return graphs

    def _later_graphs(
        self,
        group: TPGroup,
        device: torch.device,
        decode: DecodeGraphs | None,
        prefill: PrefillGraphs | None,
    ) -> LaterGraphs:
        """What is not recorded yet; steps with prompts, which gain most, come first."""
        prompts = [] if prefill is None else prefill.later()
        return LaterGraphs(group, device, prompts + ([] if decode is None else decode.later()))

    def _graph_bytes(self, model: CausalLM, backend: AttentionBackend, device: torch.device) -> int:
        """Every decode graph has logits of its own; what all of them share is less than the rest
        of GRAPH_BYTES."""
        if not self._can_record(device, backend):
            return 0
        rows = sum(graph_sizes(self.config.max_num_seqs))
        return GRAPH_BYTES + rows * model.lm_head.weight.shape[0] * model.place.dtype.itemsize

    def _can_record(self, device: torch.device, backend: AttentionBackend) -> bool:
        """Steps run eagerly on a CPU, under --enforce-eager, and with a back-end whose calls cannot
        be recorded."""
        return device.type == "cuda" and not self.config.enforce_eager and backend.graph_safe

    def _await_allocation(self) -> AllocateKV:
        received = self.status.receive()
        if received is None:
            os._exit(1)  # the coordinator is gone; the keeper knows
        return received[0]

    def _progress(self, text: str) -> None:
        self.enter(Phase.LOAD)
        self.status.send(WorkerProgress(self.rank, "load", text))

    def _say_tuning(self, text: str) -> None:
        self.status.send(WorkerProgress(self.rank, "warm_up", text))

    def report(self, error: BaseException) -> None:
        """Tell the coordinator, best effort: it may be gone, and then the exit status speaks."""
        sentence = (
            str(error)
            if isinstance(error, TPRuntimeError)
            else (f"{type(error).__name__}: {error}")
        )
        self.status.send(
            WorkerFailed(
                rank=self.rank,
                phase=self.phase.name.lower(),
                step=self.step,
                error=sentence[:4000],
                traceback="".join(traceback.format_exception(error))[-16000:],
                code=error.code if isinstance(error, TPRuntimeError) else "",
            )
        )


def run_worker(
    config: EngineConfig,
    rank: int,
    local_rank: int,
    world_size: int,
    generation: int,
    fds: WorkerDescriptors,
) -> NoReturn:
    """Called in the forked child, where the number of threads is set already.

    Ends the process: 0 after Stop, 1 after a reported error. By os._exit, because interpreter
    teardown after a failed collective can hang in C++ destructors."""
    worker = Worker(config, rank, local_rank, world_size, generation, fds)
    try:
        worker.run()
    except BaseException as error:
        try:
            worker.report(error)
        except Exception:
            logger.exception("Rank %d could not report its failure.", rank)
        os._exit(1)
    os._exit(0)
