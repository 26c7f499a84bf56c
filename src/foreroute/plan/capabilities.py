"""Abilities of the executors: one table. Executors warn of what is beyond it, and the simulator marks that.

An executor has an ability when a test of `tests/simulate/test_executed.py` names it, on CPU processes of one machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, assert_never, get_args

from foreroute.errors import ConfigError, shown
from foreroute.plan.options import PASS_NAMES

if TYPE_CHECKING:
    from foreroute.plan.step_plan import StepPlan

Executor = Literal["hf", "megatron", "megatron_flex", "hf_own"]
FetchPath = Literal["host", "direct"]
"""Path of replicas' weights: "host", through the memory that the ranks of a node share, and from peer to peer
between nodes; "direct", from peer to peer."""


class Ability(StrEnum):
    """One thing that executing a step may ask for and that some executor lacks; what all of them do is not listed."""

    REPLICAS = "replicas of experts"
    HOME_MOVES = "experts that move between steps"
    DEDUPLICATED_DISPATCH = "deduplicated dispatch"
    OVERLAP = "all-to-alls hidden behind compute"
    NODES = "expert-parallel ranks on several nodes"
    EXPERT_DATA_PARALLEL = "expert data parallelism"
    OTHER_BALANCERS = "plans of other balancers"


EXECUTES: Mapping[Executor, frozenset[Ability]] = {
    "hf": frozenset({Ability.REPLICAS, Ability.HOME_MOVES, Ability.EXPERT_DATA_PARALLEL}),
    "megatron": frozenset({Ability.REPLICAS, Ability.HOME_MOVES, Ability.EXPERT_DATA_PARALLEL}),
    "megatron_flex": frozenset({Ability.REPLICAS, Ability.HOME_MOVES, Ability.EXPERT_DATA_PARALLEL}),
    "hf_own": frozenset(),
}
"""The abilities of `foreroute.ep` on experts that transformers spreads, and on Megatron-Core; and of what serves
experts without it: the other classes of transformers' registry."""
EXECUTOR_NAMES: Mapping[Executor, str] = {
    "hf": 'transformers with ep_implementation="foreroute"',
    "megatron": "Megatron-Core with alltoall or allgather",
    "megatron_flex": "Megatron-Core with flex (DeepEP, HybridEP)",
    "hf_own": "transformers' own expert parallelism",
}
"""For people."""
SEVERAL_NODES = (
    "Plans over several nodes have been executed on nodes made of one machine alone; none has run between machines, "
    "where all times of a step are modelled."
)
"""Note on every step on several nodes, while no executor has `Ability.NODES`."""


def on_several_nodes(num_nodes: int) -> str:
    """Say what is known of plans on several nodes; empty on one, and where an executor is known to run there."""
    if num_nodes == 1 or any(Ability.NODES in abilities for abilities in EXECUTES.values()):
        return ""
    return SEVERAL_NODES


def warn_of_lacks(plan: StepPlan, executor: Executor, paths: FetchPath) -> None:
    """Warn of what a plan asks for and its executor lacks, and of prices that are of another path, or lack a part."""
    # results are those of any plan all the same, so that neither is an error
    if plan.topology.num_nodes > 1 and Ability.NODES not in EXECUTES[executor]:
        warnings.warn(
            f"the plan asks for {Ability.NODES}, and this executor ({executor}) has run on nodes made of one machine "
            "alone, so that steps may take other times than were planned; keep an expert-parallel group within a node",
            stacklevel=2,
        )
    runs_by_plan = not all(plan.is_at_home(pass_name) for pass_name in PASS_NAMES)
    if plan.unpriced and runs_by_plan:
        what = " and ".join(plan.unpriced)
        warnings.warn(
            f"the plan is executed for what it saves with {what} at no price, so that a step that waits for them may "
            "lose; have foreroute measure price them in the topology file, or plan while the rollout runs",
            stacklevel=2,
        )
    # between nodes both paths are the same, and at homes nothing travels
    has_two_paths = plan.topology.ranks_per_node > 1 and runs_by_plan
    if plan.priced_paths not in (None, paths) and has_two_paths:
        warnings.warn(
            f"the plan was priced for weights by the path {plan.priced_paths!r}, and they travel by {paths!r}, so that "
            f"it may lose to a step without replicas; plan with paths={paths!r} of the cost model, or "
            f"have weights travel so: routed.use(TransferOptions(paths={plan.priced_paths!r}))",
            stacklevel=2,
        )


def check_paths(paths: object) -> None:
    """Raise `ConfigError` unless this is a `FetchPath`."""
    if paths not in get_args(FetchPath):
        raise ConfigError(f"paths is {shown(paths)}; expected 'host' or 'direct'")


def takes_host_memory(paths: FetchPath) -> bool:
    """Say whether weights go through the memory of a node to those of its ranks that fetch them."""
    # everything that depends on the path asks here, so that another one is a type error until this knows it
    match paths:
        case "host":
            return True
        case "direct":
            return False
        case _:
            assert_never(paths)


def lacking(needs: Set[Ability]) -> tuple[str, ...]:
    """List, in words, the needs that the executor which lacks least does not have; none where one has all."""
    missing = (tuple(str(one) for one in Ability if one in needs - abilities) for abilities in EXECUTES.values())
    return min(missing, key=len)
