"""FasterMoE-style shadowing: the hottest experts are copied to all ranks, each of which serves its own tokens.

After the paper (He et al., PPoPP 2022): experts are shadowed from the hottest down as long as the slowest rank gains
more than the copies cost. Here a rank shadows no more experts than it has redundant slots, and what is shadowed already
costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.assignment import Assignment
from foreroute.balance.baselines.problem import Problem, Residence


def fastermoe_style(problem: Problem) -> Iterator[Assignment]:
    """Shadows chosen anew in every cell, by its own loads."""
    residence = Residence(problem)
    held_LE = np.zeros(problem.home_LE.shape, np.bool_)
    for layer, counts_GE in problem.cells():
        home_E = problem.home_LE[layer]
        chosen = _shadows(counts_GE, home_E, held_LE[layer], problem)
        held_LE[layer] = False
        held_LE[layer, chosen] = True
        yield residence.host(layer, *_hosts(counts_GE, home_E, chosen))


def _shadows(
    counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], held_E: NDArray[np.bool_], problem: Problem
) -> list[int]:
    """Experts to shadow: the prefix of the hottest ones with the least time for slowest rank and copies together."""
    loads_E = counts_GE.sum(axis=0)
    load_G = np.zeros(len(counts_GE), np.int64)
    np.add.at(load_G, home_E, loads_E)
    hottest: list[int] = np.argsort(-loads_E, kind="stable")[: problem.topology.redundant_slots].tolist()
    best, cost = 0, load_G.max() * problem.assignment_s
    copies = 0
    for number, expert in enumerate(hottest, start=1):
        load_G[home_E[expert]] -= loads_E[expert]
        load_G += counts_GE[:, expert]
        copies += not held_E[expert]
        seconds = load_G.max() * problem.assignment_s + copies * problem.transfer_s
        if seconds < cost:
            best, cost = number, seconds
    return hottest[:best]


def _hosts(
    counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], chosen: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    num_ranks, num_experts = counts_GE.shape
    expert_H, rank_H, tokens = [np.arange(num_experts)], [home_E.astype(np.int64)], [counts_GE.T.copy()]
    for expert in chosen:
        others = np.flatnonzero(np.arange(num_ranks) != home_E[expert])
        kept = tokens[0][expert, home_E[expert]]
        tokens[0][expert] = 0
        tokens[0][expert, home_E[expert]] = kept
        served = np.zeros((len(others), num_ranks), np.int64)
        served[np.arange(len(others)), others] = counts_GE[others, expert]
        expert_H.append(np.full(len(others), expert))
        rank_H.append(others)
        tokens.append(served)
    return np.concatenate(expert_H).astype(np.int32), np.concatenate(rank_H).astype(np.int32), np.concatenate(tokens)
