"""Which sequences each micro-step of a step takes, with as many micro-steps on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.layout import MicroBatches, by_token_budget
from foreroute.train.config.rl import RLConfig
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience

MicroSteps = list[NDArray[np.int64]]
"""The sequences of each micro-step."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Micro-steps that run on the same weights.

    Attributes:
        name: "recompute", or "update 0" and so on for the mini-steps of the update.
        after: optimizer steps of this step that come before it.
        micro_steps: the sequences of each.
    """

    name: str
    after: int
    micro_steps: MicroSteps


@dataclass(frozen=True, eq=False)
class Schedule:
    """What one rank does in one step.

    Attributes:
        recompute: all sequences in their order.
        update: for each mini-step, the informative sequences that it trains on. A rank that has too few for as many
            micro-steps as another takes some of no advantage beside them, which add nothing to the gradient.
    """

    recompute: Stage
    update: list[Stage]


def make_schedule(experience: Experience, config: RLConfig, ranks: Ranks, *, seed: tuple[int, int]) -> Schedule:
    """Deal the sequences of this rank. A collective call.

    Args:
        experience: the rollout of this rank; all ranks have equally many sequences.
        config: of the batches.
        ranks: that must take the same number of micro-steps.
        seed: of the order of the sequences.
    """
    # the last token of a sequence is not put into the model
    lengths_S = experience.generation.trace.lengths - 1

    def dealt(sequences: NDArray[np.int64], fewest: int = 0) -> MicroBatches:
        return by_token_budget(lengths_S[sequences], config.micro_step_tokens, padded=True, min_count=fewest)

    everything = np.arange(len(lengths_S))
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.informative_S))
    spare = np.flatnonzero(~experience.informative_S)
    parts = np.array_split(order, config.mini_steps)
    num_recompute, *num_update = ranks.most([len(dealt(part)) for part in [everything, *parts]]).tolist()
    update: list[Stage] = []
    for part, count in zip(parts, num_update, strict=True):
        missing = max(0, count - len(part))
        taken, spare = np.concatenate([part, spare[:missing]]), spare[missing:]
        if count:
            micro_steps = [taken[picked] for picked in dealt(taken, count)]
            update.append(Stage(f"update {len(update)}", len(update), micro_steps))
    return Schedule(Stage("recompute", 0, list(dealt(everything, num_recompute))), update)
