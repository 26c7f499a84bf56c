"""The order in which a pipeline stage visits the micro-steps."""

from __future__ import annotations

from itertools import pairwise

from foreroute.simulate.residence import Visit


def forward_only(num_micro_steps: int) -> list[Visit]:
    """The recompute: every micro-step once."""
    return [Visit(False, m) for m in range(num_micro_steps)]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_steps: int) -> list[Visit]:
    """1F1B (PipeDream-Flush, as in Megatron-LM without interleaving).

    A stage goes ahead by as many forward visits as stages follow it, then takes one backward and one forward visit in
    turn, and ends with the backward visits that are left.
    """
    ahead = min(num_stages - 1 - stage, num_micro_steps)
    order = [Visit(False, m) for m in range(ahead)]
    for m in range(num_micro_steps):
        if m + ahead < num_micro_steps:
            order.append(Visit(False, m + ahead))
        order.append(Visit(True, m))
    return order


def layer_parts(num_layers: int, num_stages: int) -> list[range]:
    """Which layers each stage has: neighbours, as evenly as possible."""
    bounds = [num_layers * p // num_stages for p in range(num_stages + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]
