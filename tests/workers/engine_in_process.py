"""A scheduler driving a runner in one process, without rings: what the two mean to each other."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import cached_property
from pathlib import Path

import torch

from tp_runtime.coordinator.limits import SchedulerLimits
from tp_runtime.coordinator.scheduler import Scheduler
from tp_runtime.coordinator.sequence import SeqKey, Sequence
from tp_runtime.messages import Answer
from tp_runtime.model_config import ModelConfig
from tp_runtime.ops.attention.backend import AttentionBackend
from tp_runtime.ops.attention.reference import ReferenceBackend
from tp_runtime.ops.group import TPGroup
from tp_runtime.sampling_params import SamplingParams
from tp_runtime.text.grammar import GrammarCompiler
from tp_runtime.text.tokenizer import Tokenizer
from tp_runtime.workers.batch_state import BatchState
from tp_runtime.workers.decode_graphs import DecodeGraphs
from tp_runtime.workers.gather_sampler import GatherSampler
from tp_runtime.workers.kv_cache import KVGeometry
from tp_runtime.workers.loader import load_weights
from tp_runtime.workers.models.registry import build_model
from tp_runtime.workers.prefill_graphs import PrefillGraphs, Room
from tp_runtime.workers.runner import Runner, StepResult
from tp_runtime.workers.sharded_sampler import ShardedSampler


def answer_of(result: StepResult) -> Answer:
    """As the worker's loop forms it."""
    return Answer(
        generation=result.plan.generation,
        step=result.plan.step,
        token_ids=result.ids.wait().numpy().tobytes(),
        logprobs=result.logprobs.collect() if result.logprobs is not None else [],
    )


class EngineInProcess:
    """One rank, plans straight from the scheduler. With a group of several ranks each of them runs
    a scheduler of its own, which decides the same because all ranks sample the same ids."""

    def __init__(
        self,
        folder: Path,
        *,
        max_model_len: int = 256,
        num_blocks: int = 64,
        block_size: int = 8,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        backend: AttentionBackend | None = None,
        group: TPGroup | None = None,
        sampler: type[GatherSampler] | type[ShardedSampler] = GatherSampler,
        rooms: Items[Room] = (),
        **limits: object,
    ) -> None:
        self._folder = folder
        self.config = ModelConfig.from_folder(folder)
        place = torch.device(device)
        group = group or TPGroup.single()
        model = build_model(
            self.config, group, dtype, place, backend or ReferenceBackend(), max_model_len
        )
        load_weights(model, folder)
        model.eval()
        self.limits = SchedulerLimits(
            max_model_len=max_model_len,
            vocab_size=self.config.vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=frozenset(self.config.eos_token_ids),
            **limits,
        )
        self.scheduler = Scheduler(self.limits)
        geometry = KVGeometry.of(self.config, group, block_size, dtype)
        state = BatchState(
            self.limits.max_num_seqs,
            -(-max_model_len // block_size),
            block_size,
            self.config.vocab_size,
            place,
        )
        kv = geometry.allocate(num_blocks, place)
        self.runner = Runner(model, kv, state, sampler(group, model.lm_head), group)
        if self.limits.graph_sizes:
            self.runner.graphs = DecodeGraphs(
                model, kv, state, self.runner.sampler, self.limits.graph_sizes
            )
            for size in reversed(self.runner.graphs.sizes):
                self.runner.graphs.record(size)
        if rooms:
            self.runner.prefill_graphs = PrefillGraphs(model, kv, state, rooms)
            for room in reversed(self.runner.prefill_graphs.rooms):
                self.runner.prefill_graphs.record(room)

    def add(self, name: str, prompt: list[int], params: SamplingParams, seed: int = 0) -> Sequence:
        seq = Sequence(SeqKey(name), prompt, params, seed=seed)
        if params.structured_outputs is not None:
            seq.grammar = self.compiler.compile(
                params.structured_outputs, params.stop_token_ids, not params.ignore_eos
            )
            seq.mask = seq.grammar.next_mask()
        self.scheduler.add(seq)
        return seq

    @cached_property
    def compiler(self) -> GrammarCompiler:
        tokenizer = Tokenizer.from_folder(self._folder)
        return GrammarCompiler(tokenizer, self.config.eos_token_ids, self.config.vocab_size)

    def make_masks(self) -> None:
        """As the grammar threads do."""
        wanted, self.scheduler.masks_wanted = self.scheduler.masks_wanted, []
        for seq in wanted:
            assert seq.grammar is not None
            seq.grammar.consume([seq.tokens[-1]])
            mask = seq.grammar.next_mask()
            if mask is None:
                self.scheduler.complete(seq)
            else:
                self.scheduler.allow(seq, mask)

    def step(self) -> int:
        """Publishes as many plans as the window allows, runs them, commits all; their number."""
        self.make_masks()
        plans = []
        while (plan := self.scheduler.plan()) is not None:
            plans.append(plan)
        results = [self.runner.step(plan) for plan in plans]
        self.updates = [u for r in results for u in self.scheduler.commit(answer_of(r))]
        return len(plans)

    def run(self) -> None:
        """Until nothing is left."""
        while self.scheduler.has_work:
            assert self.step() or not self.scheduler.has_work, "there is work and no plan"
        self.scheduler.check_invariants()
