"""One rank's part of a step of a model whose experts all ranks share, on either framework, on gloo processes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.models import CPU, Sizes, forward_step, run_model, run_schedule
from foreroute import layout, planner
from foreroute.costs.cluster_file import Cluster, load_cluster, write_rates
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Home
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.testing.ranks import Workers
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.train.ranks import Ranks
from foreroute.train.rates import measure_rates

SIZES = Sizes(hidden=256, heads=4, kv_heads=2, experts=32, top_k=4, expert_width=256)
MICRO_STEPS, BATCH = 4, (4, 64)
SLOTS = 2
PATIENCE_S = 3600
"""A benchmark that takes longer hangs."""
LINKS = Links(2e9, 1e9, 1e10, 5e-5, 1e-4)


@dataclass(frozen=True, eq=False)
class SpreadBench(ABC):
    """Micro-batches of a rank on their routes, planned for and priced by a cluster, or with `slots` at no price.

    `number` is of the last step under a plan, the same for all benches. A step with another number loads weights anew.
    """

    number: ClassVar[int] = 0
    model: Any
    routed: Any
    batches: Sequence[torch.Tensor]
    routes_M: Sequence[Any]
    counts_MLGE: NDArray[np.int32]
    cluster: Cluster | None = None
    slots: int = SLOTS

    @classmethod
    def drawn(cls, model: Any, routed: Any, *, cluster: Cluster | None = None, slots: int = SLOTS, **how: Any) -> Self:
        """Draw micro-batches as `drawn` does."""
        return cls.of(model, routed, *drawn(routed.spec, **how), cluster=cluster, slots=slots)

    @classmethod
    def of(
        cls, model: Any, routed: Any, batches: Sequence[torch.Tensor], traces: Sequence[RoutingTrace], **kept: Any
    ) -> Self:
        """Take these micro-batches. A collective call."""
        routes_M = [cls.placed(routed, trace) for trace in traces]
        return cls(model, routed, batches, routes_M, routed.gather_counts(routes_M), **kept)

    @staticmethod
    @abstractmethod
    def placed(routed: Any, trace: RoutingTrace) -> Any:
        """Place the routes of a micro-batch as the framework takes them."""

    @abstractmethod
    def executing(self, plan: StepPlan | None) -> AbstractContextManager[Any]:
        """Put a plan in force; None has every expert at its home."""

    @abstractmethod
    def run(self, *, updating: bool = True) -> None:
        """Run forward, and backward if `updating`, of all micro-steps."""

    @property
    def topology(self) -> Topology:
        """One node, or the cluster's."""
        if self.cluster is not None:
            return self.cluster.topology
        num_ranks = self.counts_MLGE.shape[2]
        return Topology(num_ranks, num_ranks, self.slots, LINKS)

    def plan(self, options: PlanOptions) -> StepPlan:
        """Plan the step."""
        costs = None if self.cluster is None else self.cluster.costs
        return planner.plan(self.counts_MLGE, self.topology, options, home_LE=self.routed.home_LE, costs=costs)

    def step(self, plan: StepPlan | None, *, updating: bool = True) -> None:
        """Run all micro-steps under a plan, whose weights are loaded anew, or with every expert at its home."""
        if plan is not None:
            SpreadBench.number += 1
        with self.executing(plan):
            self.run(updating=updating)

    def paid_step(self, options: PlanOptions, *, updating: bool = True) -> float:
        """Do all that a planned step takes, from publishing on; return the seconds before the first row."""
        SpreadBench.number += 1
        begun = time.perf_counter()
        self.routed.gather_counts(self.routes_M)  # known already; that it takes time is the point
        with self.executing(self.plan(options)):
            before_s = time.perf_counter() - begun
            self.run(updating=updating)
        dist.barrier()
        return before_s

    def unplanned_step(self, *, updating: bool = True) -> None:
        """Do all that the step takes with every expert at its home: nothing is published, and nothing planned."""
        self.step(None, updating=updating)
        dist.barrier()

    def seconds(self, plan: StepPlan | None, updating: bool) -> float:
        """Time a step on its slowest rank; publishing is left out."""
        SpreadBench.number += 1
        # ranks begin together, so that nobody's time is waiting for another's publishing
        with self.executing(plan):
            dist.barrier()
            begun = time.perf_counter()
            self.run(updating=updating)
            taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()


class HFBench(SpreadBench):
    """A bench on Hugging Face, where foreroute's executor serves a step without a plan too."""

    @staticmethod
    def placed(routed: Any, trace: RoutingTrace) -> Any:
        return routed.rows(trace)

    @property
    def homes(self) -> Mapping[int, Home]:
        """The experts of this rank, by layer, as replicas are fetched from them."""
        homes: Mapping[int, Home] = self.routed.spread.load()
        return homes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return sum(experts[0].nbytes for experts in self.homes[0].values())

    def executing(self, plan: StepPlan | None) -> AbstractContextManager[Any]:
        execution: AbstractContextManager[Any] = self.routed.execute(
            plan, self.counts_MLGE, self.routes_M, step=SpreadBench.number
        )
        return execution

    def run(self, *, updating: bool = True) -> None:
        for batch, rows in zip(self.batches, self.routes_M, strict=True):
            with torch.set_grad_enabled(updating), self.routed.replay(rows):
                run_model(self.model, batch, updating=updating)
        self.model.zero_grad(set_to_none=True)


class MegatronBench(SpreadBench):
    """A bench on Megatron-Core, whose own dispatcher serves a step without a plan."""

    @staticmethod
    def placed(routed: Any, trace: RoutingTrace) -> Any:
        return routed.shard(trace, layout.pad(trace.lengths, side="right", order="sbhd"))

    def executing(self, plan: StepPlan | None) -> AbstractContextManager[Any]:
        if plan is None:
            return nullcontext()
        execution: AbstractContextManager[Any] = self.routed.execute(plan, self.counts_MLGE, self.routes_M)
        return execution

    def run(self, *, updating: bool = True) -> None:
        batches = [{"tokens": t, "routes": r} for t, r in zip(self.batches, self.routes_M, strict=True)]
        run_schedule(self.model, self.routed.replaying(forward_step), batches, updating=updating)


def measured_cluster(path: Path, tokens: int) -> Cluster:
    """Do what `foreroute measure` does with a topology file, on the ranks that are here. A collective call."""
    ranks = Ranks(RankConsensus())
    rates = measure_rates(load_cluster(path), ranks, CPU, tokens)
    ranks.on_rank_0("writing the rates", lambda: write_rates(path, rates))
    return load_cluster(path)


def drawn(
    spec: RoutingSpec,
    *,
    skew: float = 0.3,
    zipf: float = 0.0,
    shape: tuple[int, int] = BATCH,
    micro_steps: int = MICRO_STEPS,
    rank: int | None = None,
) -> tuple[list[torch.Tensor], list[RoutingTrace]]:
    """Draw the micro-batches of a rank, by default of this one, and routes that favour some experts.

    These are the first ones, which live together, or with `zipf` those of any rank by Zipf's law of this exponent.
    """
    rng = np.random.default_rng([dist.get_rank() if rank is None else rank, int(1000 * (zipf or skew))])
    batches = [torch.from_numpy(rng.integers(0, 256, shape)) for _ in range(micro_steps)]
    favour_E = np.linspace(skew, 0, spec.num_experts)
    if zipf:
        # all ranks like the same experts, whatever they draw themselves
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
    """Run `work(rank, num_ranks, *args)` on as many gloo processes; return what it returns on rank 0."""
    with closing(Workers(num_ranks, timeout_s=PATIENCE_S)) as workers:
        return workers.run(work, num_ranks, *args)[0]
