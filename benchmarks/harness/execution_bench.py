"""A small expert-parallel model with skewed routes on gloo processes, for the cases that execute plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from foreroute import planner
from foreroute.adapters import hf
from foreroute.adapters.hf.spreading import spread
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.costs.cluster_file import Cluster, load_cluster, write_rates
from foreroute.ep import PlanExecution
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Home
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.testing.ranks import Workers
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.train.policy import CPU
from foreroute.train.ranks import Ranks
from foreroute.train.rates import measure_rates

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
MICRO_STEPS, BATCH = 4, (4, 64)
SLOTS = 2
PATIENCE_S = 3600
"""A benchmark that takes longer hangs."""
LINKS = Links(2e9, 1e9, 1e10, 5e-5, 1e-4)


@dataclass(frozen=True, eq=False)
class Bench:
    """One rank's part of the step.

    Attributes:
        number: of the step, the same for all benches; another one has weights taken up anew.
        cluster: what plans are made for and priced by; None: nothing is priced.
        slots: redundant ones of a rank, where there is no cluster.
    """

    number: ClassVar[int] = 0
    routed: hf.RoutedTransformer
    batches: list[torch.Tensor]
    traces: list[RoutingTrace]
    rows_M: list[TraceRows]
    counts_MLGE: NDArray[np.int32]
    cluster: Cluster | None = None
    slots: int = SLOTS

    @classmethod
    def of(cls, rank: int, num_ranks: int) -> Bench:
        """With routes that favour the first experts, as trained routers favour some."""
        return cls.routed_anew(hf.attach(spread_model()), rank)

    @classmethod
    def routed_anew(
        cls,
        routed: hf.RoutedTransformer,
        rank: int,
        *,
        skew: float = 0.3,
        zipf: float = 0.0,
        shape: tuple[int, int] = BATCH,
        micro_steps: int = MICRO_STEPS,
        cluster: Cluster | None = None,
        slots: int = SLOTS,
    ) -> Bench:
        """The same model on other routes, as `drawn` has them."""
        batches, traces = drawn(routed.spec, rank, skew=skew, zipf=zipf, shape=shape, micro_steps=micro_steps)
        rows_M = [routed.rows(trace) for trace in traces]
        return cls(routed, batches, traces, rows_M, routed.gather_counts(rows_M), cluster, slots)

    def plan(self, options: PlanOptions) -> StepPlan:
        """Of the step."""
        costs = None if self.cluster is None else self.cluster.costs
        return planner.plan(self.counts_MLGE, self.topology, options, home_LE=self.routed.home_LE, costs=costs)

    @property
    def topology(self) -> Topology:
        """One node."""
        if self.cluster is not None:
            return self.cluster.topology
        num_ranks = self.counts_MLGE.shape[2]
        return Topology(num_ranks, num_ranks, self.slots, LINKS)

    @property
    def homes(self) -> Mapping[int, Home]:
        """The experts of this rank, by layer, as replicas are fetched from them."""
        assert self.routed.spread is not None, "it was loaded so"
        return self.routed.spread.load()

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return sum(experts[0].nbytes for experts in self.homes[0].values())

    def step(self, plan: StepPlan | None, *, updating: bool = True) -> PlanExecution:
        """All micro-steps under a plan, or with every expert at its home, as `run` has them."""
        with self.executing(plan) as execution:
            self.run(updating=updating)
        return execution

    def executing(self, plan: StepPlan | None) -> AbstractContextManager[PlanExecution]:
        """Put a plan in force, in a step that has begun already or in one that begins."""
        return self.routed.execute(plan, self.counts_MLGE, self.rows_M, step=Bench.number)

    def run(self, *, updating: bool = True) -> None:
        """Forward, and backward if `updating`, of all micro-steps."""
        for batch, rows in zip(self.batches, self.rows_M, strict=True):
            with torch.set_grad_enabled(updating), self.routed.replay(rows):
                run_model(self.routed.model, batch, updating=updating)
        self.routed.model.zero_grad(set_to_none=True)

    def paid_step(self, options: PlanOptions, *, updating: bool = True) -> float:
        """All that a planned step takes: weights are published, the plan is made, and it is executed on all ranks.

        Returns:
            The seconds before the first row.
        """
        Bench.number += 1
        begun = time.perf_counter()
        with self.executing(self.plan(options)):
            before_s = time.perf_counter() - begun
            self.run(updating=updating)
        dist.barrier()
        return before_s

    def unplanned_step(self, *, updating: bool = True) -> None:
        """All that the step takes with every expert at its home: nothing is published, and nothing planned."""
        self.step(None, updating=updating)
        dist.barrier()


def spread_model(
    sizes: Mapping[str, Any] = SIZES,
    implementation: str = "foreroute",
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A Qwen3-MoE in training mode, spread over all ranks, with the same weights each time. A collective call."""
    return spread(hf.build_model("qwen3_moe", seed=0, **sizes).to(dtype), device, implementation).train()


def run_model(model: Any, batch: torch.Tensor, *, updating: bool = True) -> None:
    """A forward, and a backward if `updating`."""
    loss = model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)[..., 0].mean()
    if updating:
        loss.backward()


def measured_cluster(path: Path, tokens: int) -> Cluster:
    """What `foreroute measure` makes of a topology file, on the ranks that are here. A collective call."""
    ranks = Ranks(RankConsensus())
    rates = measure_rates(load_cluster(path), ranks, CPU, tokens)
    ranks.on_rank_0("writing the rates", lambda: write_rates(path, rates))
    return load_cluster(path)


def drawn(
    spec: RoutingSpec,
    rank: int,
    *,
    skew: float = 0.3,
    zipf: float = 0.0,
    shape: tuple[int, int] = BATCH,
    micro_steps: int = MICRO_STEPS,
) -> tuple[list[torch.Tensor], list[RoutingTrace]]:
    """The micro-batches of a rank, int64 `shape`, and routes for them.

    They favour the first experts, which live together, and with `skew` 0 none; or, with `zipf`, experts of any rank by
    Zipf's law of this exponent.
    """
    rng = np.random.default_rng([rank, int(1000 * (zipf or skew))])
    batches = [torch.from_numpy(rng.integers(0, 256, shape)) for _ in range(micro_steps)]
    favour_E = np.linspace(skew, 0, spec.num_experts)
    if zipf:
        favour_E = -zipf * np.log(1 + np.random.default_rng(7).permutation(spec.num_experts))
    draw = rng.gumbel if zipf else rng.uniform
    return batches, [_favouring(spec, batch, draw, favour_E) for batch in batches]


def _favouring(
    spec: RoutingSpec, batch: torch.Tensor, draw: Callable[..., NDArray[np.float64]], favour_E: NDArray[np.float64]
) -> RoutingTrace:
    tokens = batch.numpy()
    scores = [draw(size=(len(row), spec.num_layers, spec.num_experts)) + favour_E for row in tokens]
    ids = [np.argsort(-score, axis=-1)[..., : spec.top_k] for score in scores]
    return RoutingTrace.from_sequences(spec, list(tokens), ids)


def in_processes(work: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
    """What `work(rank, num_ranks, *args)` returns on rank 0 of as many gloo processes."""
    with closing(Workers(num_ranks, timeout_s=PATIENCE_S)) as workers:
        return workers.run(work, num_ranks, *args)[0]
