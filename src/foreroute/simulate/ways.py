"""Ways of a step with less than a plan: sequences that are packed for its homes, and homes that move once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.links import served_loads
from foreroute.costs.model import CostModel
from foreroute.costs.pricing import step_parts
from foreroute.plan.hosts import Hosts
from foreroute.plan.step_plan import LEAST_GAIN, StepPlan
from foreroute.planner.homes import place_homes
from foreroute.planner.packed_homes import PackedSequences
from foreroute.simulate.methods import over
from foreroute.simulate.optimizer_step import STATE_BYTES, move_seconds

WayName = Literal["static", "packing", "homes", "plan"]
"""Nothing is done; sequences are packed by routes; experts move too, before the step; the plan as it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to level a step, as if both passes ran by it. Bytes are of a rank, on average.

    Attributes:
        name: which one.
        imbalance: the slowest rank's assignments over the mean, on average over all cells.
        passes_s: modelled seconds of recompute and update.
        moves_s: of experts that move before the step.
        moved_bytes: of these experts, with optimizer state.
        fetched_bytes: weights of replicas, in a pass.
    """

    name: WayName
    imbalance: float
    passes_s: float
    moves_s: float
    moved_bytes: float
    fetched_bytes: float


def ways_to_level(
    found: StepPlan,
    counts_MLGE: NDArray[np.integer],
    costs: CostModel,
    sequences: PackedSequences | None,
    *,
    max_moves: int | None = None,
) -> Iterator[Way]:
    """Give each way, the plan last; what packs sequences only where they are known, packed as they were planned.

    `max_moves` is how many homes of a layer may move where no replica is made; None sets no limit.
    """
    topology, home_LE = found.topology, found.previous_home_LE

    def way(name: WayName, hosts: Hosts, counts: NDArray[np.integer]) -> Way:
        served_MLG, _, fetched_ML = served_loads(hosts, counts, topology.ranks_per_node)
        moves = int((hosts.home_LE != home_LE).sum())
        expert_bytes = costs.model.expert_bytes / topology.num_ranks
        state_bytes = costs.model.expert_parameters * STATE_BYTES / topology.num_ranks
        return Way(
            name=name,
            imbalance=float(over(served_MLG.max(axis=2), served_MLG.mean(axis=2)).mean()),
            passes_s=float(step_parts(hosts, counts, topology, costs, found.slots).sum()),
            moves_s=move_seconds(home_LE, hosts.home_LE, 1.0, topology, costs),
            moved_bytes=moves * (expert_bytes + state_bytes),
            fetched_bytes=int(fetched_ML.sum()) * expert_bytes,
        )

    def at(homes_LE: NDArray[np.int16], counts: NDArray[np.integer]) -> Hosts:
        return Hosts.with_room(homes_LE, len(counts), topology.num_ranks, 0)

    yield way("static", at(home_LE, counts_MLGE), counts_MLGE)
    if sequences is None:
        placed_LE = place_homes(counts_MLGE, topology, home_LE, max_moves=max_moves)
        yield way("homes", at(placed_LE, counts_MLGE), counts_MLGE)
    else:
        packed_MLGE = sequences.packed_for(home_LE).counts_MLGE()
        yield way("packing", at(home_LE, packed_MLGE), packed_MLGE)
        packed, placed_LE = sequences.with_homes(topology, home_LE, max_moves=max_moves)
        packed_MLGE = packed.counts_MLGE()
        yield way("homes", at(placed_LE, packed_MLGE), packed_MLGE)
    yield way("plan", found.hosts, counts_MLGE)


def simplest(ways: Sequence[Way], *, next_steps: bool = False, once_s: float = 0.0) -> Way:
    """The first way that takes hardly longer than the fastest: what comes later does more for it.

    In `next_steps` that route as this one no home moves; `once_s` are seconds that the plan takes in each step besides.
    """
    seconds = [way.passes_s + once_s * (way.name == "plan") + (0 if next_steps else way.moves_s) for way in ways]
    return next(way for way, each in zip(ways, seconds, strict=True) if (1 - LEAST_GAIN) * each <= min(seconds))
