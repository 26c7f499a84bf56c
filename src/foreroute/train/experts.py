"""Expert-parallel execution: the experts are spread over the ranks of a run, and each pass executes a plan.

routes known ─▶ counts of all ranks ─▶ rank 0's thread:   recompute │ update 0 │ update 1 │ …
                                                                    ▼          ▼
every rank:                                                         recompute ─▶ update 0 ─▶ …
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from foreroute import planner
from foreroute.adapters.hf import RoutedTransformer
from foreroute.adapters.hf.response_logprobs import inputs
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.costs.cluster_file import load_cluster
from foreroute.costs.model import CostModel
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.errors import ConfigError
from foreroute.layout import Packing, PackingCertificate, exchange_sequences
from foreroute.plan import Links, PlanOptions, StepPlan, Topology, sequence_counts
from foreroute.plan.options import PRICED
from foreroute.planner.homes import place_homes
from foreroute.records.step_record import ExecutionRecord
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.train.config import ParallelConfig, TrainConfig
from foreroute.train.memory import MemoryBudget
from foreroute.train.policy import Alone, OneProcess, ScheduledPass
from foreroute.train.record import ExecutedPass, MovedHomes, execution_record

NO_LINKS = Links(1e9, 1e9, 1e9, 1e-5, 1e-5)
"""The links of a run without a topology file, whose plans nobody prices."""


def make_execution(config: TrainConfig, policy: RoutedTransformer, ranks: Alone) -> OneProcess:
    """Execute the policy in one process, or with its experts spread over all ranks."""
    return OneProcess(policy, ranks) if ranks.size == 1 else ExpertParallel(policy, config, ranks)


class Planning(NamedTuple):
    """Inputs of every plan of a run; without prices nothing is priced."""

    topology: Topology
    options: PlanOptions
    costs: CostModel | None


def read_planning(config: ParallelConfig, spec: RoutingSpec) -> Planning:
    """Put together what the configuration says and its topology file.

    Raises `ConfigError` when the file cannot be read, or is of other ranks or another model.
    """
    if config.topology is None:
        per_node = config.ranks_per_node or config.expert
        return Planning(Topology(config.expert, per_node, config.redundant_slots, NO_LINKS), config.plan, None)
    path = Path(config.topology)
    cluster = load_cluster(path)
    model = cluster.costs.model
    seen = {
        "num_ranks": (cluster.topology.num_ranks, config.expert),
        "num_layers": (model.num_layers, spec.num_layers),
        "num_experts": (model.num_experts, spec.num_experts),
        "top_k": (model.top_k, spec.top_k),
    }
    if wrong := [f"{name} = {said}, the run has {here}" for name, (said, here) in seen.items() if said != here]:
        raise ConfigError(f"{path} says {'; '.join(wrong)}; describe the ranks and the model of the run")
    return Planning(cluster.topology, config.plan, replace(cluster.costs, paths=config.paths, prefetch=config.prefetch))


class _Announced(NamedTuple):
    """An announced pass, on weights with `number` optimizer steps behind them; `making` is the first rank's plan."""

    run: ExecutedPass
    rows_M: list[TraceRows]
    number: int
    making: Future[StepPlan]


class ExpertParallel(OneProcess):
    """The execution of a policy that is spread over the ranks.

    Raises:
        ConfigError: when the topology file cannot be read, or is not the same on all ranks.
    """

    def __init__(self, policy: RoutedTransformer, run: TrainConfig, ranks: Alone) -> None:
        super().__init__(policy, ranks)
        config = run.parallel
        self._policy = policy
        policy.use(
            TransferOptions(paths=config.paths, prefetch=config.prefetch, shared_memory=Path(config.shared_memory))
        )
        self._planning = read_planning(config, policy.spec)
        self._budget = MemoryBudget(policy, run, ranks, self._planning.topology)
        ranks.require_same({"the topology": str(self._planning)}, "Give all of them the same topology file")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foreroute-plans")
        self._announced: dict[str, _Announced] = {}
        self._moved = MovedHomes()
        self._rows_M: list[TraceRows] | None = None
        self._executed: list[ExecutedPass] = []

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give what the base says, and "homes", int16 [L, E], where experts may move."""
        if self._planning.options.home_moves == 0:
            return super().state(optimizer)
        home_LE = self._policy.home_LE
        # a checkpoint has its experts in one order, whatever the homes, so that other ranks can take it up
        self._policy.move_homes(self._policy.block_home_LE, optimizer)
        state = super().state(optimizer)
        self._policy.move_homes(home_LE, optimizer)
        return {**state, "homes": torch.from_numpy(home_LE)}

    def restore(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        super().restore(state, optimizer)
        block_LE = self._policy.block_home_LE
        # of rank 0, as no home is below 0
        home_LE = self.ranks.max(np.resize(state.get("homes", 0), block_LE.shape))
        # those of a run on other ranks are of no use
        if self._planning.options.home_moves != 0 and (np.sort(home_LE, axis=1) == block_LE).all():
            self._policy.move_homes(home_LE, optimizer)

    def plan(
        self,
        first: int,
        routes: RoutingTrace,
        passes: Sequence[ScheduledPass],
        optimizer: torch.optim.Optimizer,
        targets_S: NDArray[np.int64],
    ) -> list[ScheduledPass]:
        rows, counts = self._count(routes, passes)
        # all passes are counted before the first one, since homes serve all of them
        if counts and self._planning.options.home_moves != 0:
            self._place_experts(np.concatenate(counts), optimizer)
        certificates: list[PackingCertificate | None] = [None] * len(passes)
        if self._planning.options.packing == "routes":  # for homes that were placed by counts by length
            passes, certificates = self._exchange_sequences(routes, passes)
            rows, counts = self._count(routes, passes)
        announced, kept = [], None
        for each, rows_M, counts_MLGE, certificate in zip(passes, rows, counts, certificates, strict=True):
            run, making = self._begin_planning(ExecutedPass(each.name, counts_MLGE, certificate))
            if self._budget and run.pass_name == "recompute":
                kept = self._wait_for_plan(run, making).in_pass("recompute")
            while self._budget and run.pass_name == "update":
                plan, lengths_S = self._wait_for_plan(run, making).in_pass("update"), routes.lengths - 1
                # slots are kept as long as the weights
                left = kept if each.after == 0 else None
                forecast = self._budget.forecast(each, lengths_S, targets_S, run.counts_MLGE, plan, left, optimizer)
                run.forecast_bytes = int(forecast.bytes_MG.max())
                if self._budget.fits(forecast):
                    break
                each, waited_s = self._budget.one_more(each, lengths_S, forecast), run.exposed_planning_s
                if self._planning.options.packing == "routes":
                    (each,), (certificate,) = self._exchange_sequences(routes, [each])
                (rows_M,), (counts_MLGE,) = self._count(routes, [each])
                repacked = ExecutedPass(each.name, counts_MLGE, certificate, exposed_planning_s=waited_s)
                run, making = self._begin_planning(repacked)
            self._announced[each.name] = _Announced(run, rows_M, first + each.after, making)
            announced.append(each)
        return announced

    def _begin_planning(self, run: ExecutedPass) -> tuple[ExecutedPass, Future[StepPlan]]:
        """Let the thread of rank 0 plan a pass: passes are planned in the order in which they run."""
        if self.ranks.rank > 0:
            return run, Future()
        return run, self._thread.submit(self._make, run, self._policy.home_LE)

    def _wait_for_plan(self, run: ExecutedPass, making: Future[StepPlan]) -> StepPlan:
        """Share the plan of a pass. A collective call; what it waits is on the pass's account."""
        begun = time.monotonic()
        plan = self._policy.share_plan(making.result)
        run.exposed_planning_s += time.monotonic() - begun
        return plan

    @contextmanager
    def running(self, planned: ScheduledPass) -> Iterator[None]:
        announced = self._announced.pop(planned.name, None)
        if announced is None:
            yield
            return
        now, rows_M, number, making = announced
        plan = self._wait_for_plan(now, making)
        # at homes where the plan saves too little in this pass
        now.plan = plan.in_pass(now.pass_name)
        with self._policy.execute(plan, now.counts_MLGE, rows_M, step=number) as execution:
            self._rows_M = rows_M
            try:
                yield
            finally:
                self._rows_M = None
        now.executed_ML, now.transfers = execution.executed_ML, execution.transfers
        self._executed.append(now)

    def to_replay(self, number: int, routes: RoutingTrace) -> RoutingTrace | TraceRows:
        return routes if self._rows_M is None else self._rows_M[number]

    def finish_gradients(self, max_norm: float) -> float:
        # experts have a mesh of their own, and torch clips over one
        by_mesh = defaultdict[Any, list[Any]](list)
        for parameter in self._policy.model.parameters():
            if parameter.grad is not None:
                by_mesh[cast(DTensor, parameter.grad).device_mesh].append(parameter)
        norms = [get_total_norm([each.grad for each in alike]) for alike in by_mesh.values()]
        # one norm over both meshes, as one process has it
        norm = torch.stack([cast(DTensor, each).full_tensor() for each in norms]).norm()
        for alike in by_mesh.values():
            clip_grads_with_norm_(alike, max_norm, norm)
        return float(norm)

    def record(self) -> ExecutionRecord | None:
        assert not self._announced, f"planned and never executed: {', '.join(self._announced)}"
        executed, self._executed = self._executed, []
        moved, self._moved = self._moved, MovedHomes()
        return execution_record(executed, moved, self.ranks)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)  # plans of passes that will not run
        self._policy.close()

    def _count(
        self, routes: RoutingTrace, passes: Sequence[ScheduledPass]
    ) -> tuple[list[list[TraceRows]], list[NDArray[np.int32]]]:
        """Give what the micro-steps of every pass replay here, and count it on all ranks: [M, L, G, E] of each."""
        rows = [
            [self._policy.rows(inputs(routes.select(sequences))) for sequences in each.micro_steps] for each in passes
        ]
        return rows, [self._policy.gather_counts(rows_M) for rows_M in rows]

    def _exchange_sequences(
        self, routes: RoutingTrace, passes: Sequence[ScheduledPass]
    ) -> tuple[list[ScheduledPass], list[PackingCertificate | None]]:
        """Exchange sequences of each pass between micro-steps, so that experts at home are level, as rank 0 finds."""
        here = inputs(routes)
        # one more than the micro-step, 0 of a sequence that is not in the pass
        step_PS = np.zeros((len(passes), len(here)), np.int64)
        for step_S, each in zip(step_PS, passes, strict=True):
            for number, sequences in enumerate(each.micro_steps):
                step_S[sequences] = number + 1
        parts = self.ranks.gather((sequence_counts(here), here.lengths, step_PS))
        found_PGS = np.zeros((len(passes), self.ranks.size, len(here)), np.int64)
        certificates: list[PackingCertificate | None] = [None] * len(passes)

        def exchange() -> None:
            if not parts:
                return
            counts_GSLE, lengths_GS, step_GPS = (np.stack(each) for each in zip(*parts, strict=True))
            for number, each in enumerate(passes):
                rank_S, s = np.nonzero(step_GPS[:, number])
                step_S = (step_GPS[rank_S, number, s] - 1).astype(np.int32)
                by_length = Packing(step_S, rank_S.astype(np.int32), len(each.micro_steps), self.ranks.size)
                packing = exchange_sequences(
                    by_length,
                    lengths_GS[rank_S, s],
                    counts_GSLE[rank_S, s],
                    homes=self._policy.home_LE,
                    padded=True,
                )
                found_PGS[number, rank_S, s] = packing.micro_step_S + 1
                certificates[number] = packing.certificate

        self.ranks.on_all("packing by routes", exchange)
        # nothing is below 0, so that the largest is rank 0's
        step_PS = self.ranks.max(found_PGS)[:, self.ranks.rank]
        packed = [
            replace(each, micro_steps=[np.flatnonzero(step_S == m + 1) for m in range(len(each.micro_steps))])
            for each, step_S in zip(passes, step_PS, strict=True)
        ]
        return packed, certificates

    def _place_experts(self, counts_MLGE: NDArray[np.integer], optimizer: torch.optim.Optimizer) -> None:
        """Move experts to where rank 0 wants them for these micro-steps, until they can move again."""
        begun, before_LE = time.monotonic(), self._policy.home_LE
        topology, options, _ = self._planning

        def place() -> NDArray[np.integer]:
            if self.ranks.rank > 0:
                return np.zeros_like(before_LE)
            return place_homes(counts_MLGE, topology, before_LE, max_moves=options.home_moves)

        # no home is below 0, so that the largest is rank 0's
        home_LE = self.ranks.max(self.ranks.on_all("placing experts", place))
        received = self._policy.move_homes(home_LE, optimizer)
        self._moved = MovedHomes(int((home_LE != before_LE).sum()), received, time.monotonic() - begun)

    def _make(self, run: ExecutedPass, home_LE: NDArray[np.int16]) -> StepPlan:
        """Plan a pass, in the thread. Homes stay: they move between steps. Sequences are packed."""
        begun, (topology, options, costs) = time.monotonic(), self._planning
        stay = replace(options, home_moves=0, packing="length")
        plan, why = planner.plan_and_why(run.counts_MLGE, topology, stay, home_LE=home_LE, costs=costs)
        run.priced_options = {name: why[name] for name in (*PRICED, run.pass_name)}
        run.planning_s = time.monotonic() - begun
        return plan
