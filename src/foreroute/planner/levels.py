"""Which levels of the planner that go by prices are on in a step, and why; and what planning them exposes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from foreroute.costs.model import CostModel
from foreroute.plan.options import PlanOptions
from foreroute.plan.topology import Topology

LONGEST_BLOCK = 8
"""Micro-steps that one compiled call plans at most; the first plans one, so that execution can begin. Chosen by hand:
longer blocks would hand cells over later, and a call costs little beside eight micro-steps."""
LEVELS = ("traffic", "pay_off")


def levels_by_price(
    topology: Topology, options: PlanOptions, costs: CostModel | None
) -> tuple[PlanOptions, dict[str, str]]:
    """Settle traffic and pay-off where the options leave them open.

    Returns:
        The options with both of them on or off.
        By level, whether it is on, and why.
    """
    never = None
    if not (options.replicas and topology.redundant_slots):
        never = "there are no replicas"
    elif costs is None:
        never = "nothing is priced"
    against = {"pay_off": never, "traffic": never}
    if never is None and topology.num_nodes == 1:
        against["traffic"] = "all ranks share a node"
    elif never is None and options.slots == "layer":
        against["traffic"] = "slots of each layer keep what they hold, and it refills all"
    settled: dict[str, Any] = {}
    why = {}
    for level in LEVELS:
        asked = getattr(options, level)
        settled[level] = against[level] is None if asked is None else asked
        if asked is not None:
            why[level] = f"{'on' if asked else 'off'}: asked for"
        else:
            why[level] = "on: where it saves time" if settled[level] else f"off: {against[level]}"
    return replace(options, **settled), why


def block_ends(num_micro_steps: int) -> list[int]:
    """Where the blocks of micro-steps end that are planned at once: 1, 2, 4, 8, then every `LONGEST_BLOCK`."""
    ends = [1]
    while ends[-1] < num_micro_steps:
        ends.append(min(2 * ends[-1], ends[-1] + LONGEST_BLOCK, num_micro_steps))
    return ends


def exposed_planning(num_micro_steps: int, plan_s: float, run_s: float) -> float:
    """Seconds that micro-steps wait for their plans, which are handed over in blocks while earlier ones run.

    Args:
        num_micro_steps: M.
        plan_s: of planning one.
        run_s: of running one.
    """
    ended_s = 0.0
    for begin, end in pairwise([0, *block_ends(num_micro_steps)]):
        ended_s = max(ended_s, end * plan_s) + (end - begin) * run_s
    return ended_s - num_micro_steps * run_s
