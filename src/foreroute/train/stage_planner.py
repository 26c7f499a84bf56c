"""What a run on several ranks plans with, and the thread of rank 0 that plans its stages, one after the other."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute import planner
from foreroute.costs.cluster_file import load_cluster
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.planner import PlanInProgress
from foreroute.planner.homes import place_homes
from foreroute.trace import RoutingSpec
from foreroute.train.config import ParallelConfig

NO_LINKS = Links(1.0, 1.0, 1.0, 1.0, 1.0)
"""Of a run without a topology file, whose plans nobody prices."""


class Planning(NamedTuple):
    """What plans are made with.

    Attributes:
        topology: of the run's ranks.
        options: of the planner.
        costs: the prices; None where nothing is priced.
    """

    topology: Topology
    options: PlanOptions
    costs: CostModel | None


def read_planning(config: ParallelConfig, spec: RoutingSpec) -> Planning:
    """Put together what the configuration says and its topology file.

    Args:
        config: of the run.
        spec: of the model that is trained.

    Raises:
        ConfigError: when the file cannot be read, or is of other ranks or another model.
    """
    moves = None if config.home_moves == "all" else config.home_moves
    options = PlanOptions(
        tolerance=config.tolerance,
        home_moves=moves,
        slots=config.slots,
        traffic=config.traffic,
        pay_off=config.pay_off,
    )
    if config.topology is None:
        per_node = config.ranks_per_node or config.expert
        return Planning(Topology(config.expert, per_node, config.redundant_slots, NO_LINKS), options, None)
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
    return Planning(cluster.topology, options, replace(cluster.costs, paths=config.paths, prefetch=config.prefetch))


class PlannedStage(NamedTuple):
    """A stage's plan, on the rank that plans: as soon as it is begun, and the seconds that it took in all."""

    progress: Future[PlanInProgress]
    seconds: Future[float]


class StagePlanner:
    """Plans stages in the order in which they are announced, in a thread."""

    def __init__(self, planning: Planning) -> None:
        self.planning = planning
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="foreroute-plans")

    def homes(self, counts_MLGE: NDArray[np.integer], home_LE: NDArray[np.int16]) -> NDArray[np.int16]:
        """Where experts should live, int16 [L, E], for all micro-steps until they can move again."""
        topology, options, _ = self.planning
        return place_homes(counts_MLGE, topology, home_LE, max_moves=options.home_moves, seed=options.seed)

    def submit(self, counts_MLGE: NDArray[np.integer], home_LE: NDArray[np.int16]) -> PlannedStage:
        """Plan a stage whose homes are these, after those that were announced before."""
        progress: Future[PlanInProgress] = Future()

        def work() -> float:
            begun = time.monotonic()
            try:
                progress.set_result(begin_plan(self.planning, counts_MLGE, home_LE))
            except BaseException as error:  # it must reach whoever waits for the plan
                progress.set_exception(error)
                raise
            progress.result().result()
            return time.monotonic() - begun

        return PlannedStage(progress, self._thread.submit(work))

    def close(self) -> None:
        """Plan nothing more."""
        self._thread.shutdown(cancel_futures=True)


def begin_plan(planning: Planning, counts_MLGE: NDArray[np.integer], home_LE: NDArray[np.int16]) -> PlanInProgress:
    """Begin the plan of a stage. Homes stay: they move between steps."""
    topology, options, costs = planning
    return planner.start(counts_MLGE, topology, replace(options, home_moves=0), home_LE=home_LE, costs=costs)


def compile_planner(planning: Planning) -> None:
    """Compile the planner's kernels, which takes a minute where no process of the machine has done it before."""
    num_ranks = planning.topology.num_ranks
    num_experts = 2 * num_ranks if planning.costs is None else planning.costs.model.num_experts
    # all assignments go to one expert, so that replicas are placed and every kernel is reached
    counts_MLGE = np.zeros((1, 1, num_ranks, num_experts), np.int32)
    counts_MLGE[..., 0] = 64
    topology = planning.topology if planning.topology.redundant_slots else replace(planning.topology, redundant_slots=1)
    home_LE = topology.contiguous_home_E(num_experts)[None]
    if planning.options.home_moves != 0:
        place_homes(counts_MLGE, topology, home_LE, max_moves=planning.options.home_moves)
    begin_plan(planning._replace(topology=topology), counts_MLGE, home_LE).result()
