"""Ways of a step with less than a plan: sequences that are packed for its homes, and homes that move once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.plan.step_plan import LEAST_GAIN, StepPlan
from foreroute.planner.homes import place_homes
from foreroute.planner.packed_homes import PackedSequences
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import record_of
from foreroute.simulate.methods import ServedStep, all_at_home
from foreroute.simulate.records import PricedMethod


def ways_to_level(
    found: StepPlan,
    problem: BalancerInput,
    costs: CostModel,
    sequences: PackedSequences | None,
    *,
    max_moves: int | None = None,
) -> Iterator[PricedMethod]:
    """Yield each way to level a step, as if both passes ran by it, the plan last.

    "static" does nothing; "packing" packs sequences by routes; "homes" moves experts too, before the step; "plan" is
    the plan as it was asked for. What packs sequences only where they are known, packed as they were planned.
    `max_moves` is how many homes of a layer may move where no replica is made; None sets no limit.
    """
    topology, home_LE = found.topology, found.previous_home_LE

    def way(name: str, label: str, step: BalancerInput, homes_LE: NDArray[np.int16] = home_LE) -> PricedMethod:
        served = replace(all_at_home(replace(step, home_LE=homes_LE)), before_LE=home_LE)
        return record_of(served, topology, costs, name=name, label=label)

    yield way("static", "as it is", problem)
    if sequences is None:
        placed_LE = place_homes(problem.counts_MLGE, topology, home_LE, max_moves=max_moves)
        yield way("homes", "homes moved", problem, placed_LE)
    else:
        yield way("packing", "packed by routes", problem.packed_as(sequences.packed_for(home_LE)))
        packed, placed_LE = sequences.with_homes(topology, home_LE, max_moves=max_moves)
        yield way("homes", "packed by routes, homes moved", problem.packed_as(packed), placed_LE)
    # without gains nothing is decided: both passes are those of the plan
    planned = ServedStep.of(replace(found, gains={}), problem)
    yield record_of(planned, topology, costs, name="plan", label="the plan")


def simplest(ways: Sequence[PricedMethod], *, next_steps: bool = False, once_s: float = 0.0) -> PricedMethod:
    """The first way that takes hardly longer than the fastest: what comes later does more for it.

    In `next_steps` that route as this one no home moves; `once_s` are seconds that the plan takes in each step besides.
    """
    seconds = [way.training_s if next_steps else way.step_s for way in ways]
    seconds = [each + once_s * (way.name == "plan") for way, each in zip(ways, seconds, strict=True)]
    return next(way for way, each in zip(ways, seconds, strict=True) if (1 - LEAST_GAIN) * each <= min(seconds))
