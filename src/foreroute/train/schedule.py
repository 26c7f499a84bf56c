"""Which sequences each micro-step of a step takes, with as many micro-steps on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from foreroute.layout import by_token_budget
from foreroute.trace.checks import as_offsets, join_ranges
from foreroute.train.config.rl import RLConfig
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience

ValueT = TypeVar("ValueT", bound=np.generic)
MicroSteps = list[NDArray[np.int64]]
"""The sequences of each micro-step."""


@dataclass(frozen=True, eq=False)
class Stage:
    """Micro-steps that run on the same weights.

    Attributes:
        name: "recompute", or "update 0" and so on for the mini-batches of the update.
        after: how many optimizer steps of this rollout come before it.
        micro_steps: the sequences of each.
    """

    name: str
    after: int
    micro_steps: MicroSteps

    @property
    def restore_S(self) -> NDArray[np.int64]:
        """int64 [S], for a stage that takes all sequences: its joined results, `[restore_S]`, are in their order."""
        return np.argsort(np.concatenate(self.micro_steps))

    def in_order(self, parts: Sequence[NDArray[ValueT]], lengths_S: NDArray[np.int64]) -> NDArray[ValueT]:
        """Put rows of all micro-steps in the order of the sequences, of which each has `lengths_S` rows."""
        sequences, joined = np.concatenate(self.micro_steps), np.concatenate(parts)
        ordered = np.empty_like(joined)
        # row r of the joined parts belongs to a sequence that starts at that sequence's offset in the result
        ordered[join_ranges(as_offsets(lengths_S)[sequences], lengths_S[sequences])] = joined
        return ordered


@dataclass(frozen=True, eq=False)
class Schedule:
    """The micro-steps of one rank in one step. Sequences of like lengths share one, so that little is padded.

    Attributes:
        recompute: all sequences.
        update: for each mini-batch, the informative sequences that it trains on. A rank that has too few for as many
            micro-steps as another takes some of no advantage beside them, which add nothing to the gradient.
    """

    recompute: Stage
    update: list[Stage]


def make_schedule(experience: Experience, config: RLConfig, ranks: Ranks, *, seed: tuple[int, int]) -> Schedule:
    """Assign the sequences of this rank to micro-steps. A collective call.

    Args:
        experience: the rollout of this rank; all ranks have equally many sequences.
        config: of the batches.
        ranks: that must take the same number of micro-steps.
        seed: of the order of the sequences.
    """
    # the last token of a sequence is not put into the model
    lengths_S = experience.generation.trace.lengths - 1

    def packed(sequences: NDArray[np.int64], fewest: int = 0) -> MicroSteps:
        longest_first = np.argsort(-lengths_S[sequences], kind="stable")
        cost_S = lengths_S[sequences[longest_first]]
        parts = by_token_budget(cost_S, config.micro_step_tokens, padded=True, min_count=fewest)
        return [sequences[np.sort(longest_first[picked])] for picked in parts]

    everything = np.arange(len(lengths_S))
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.informative_S))
    spare = np.flatnonzero(~experience.informative_S)
    parts = np.array_split(order, config.mini_steps)
    # every rank takes part in the collectives of every micro-step, so all need as many as the rank with the most
    num_recompute, *num_update = ranks.max([len(packed(part)) for part in [everything, *parts]]).tolist()
    update: list[Stage] = []
    for part, count in zip(parts, num_update, strict=True):
        # a micro-step holds one sequence at least
        missing = max(0, count - len(part))
        taken, spare = np.concatenate([part, spare[:missing]]), spare[missing:]
        if count:
            update.append(Stage(f"update {len(update)}", len(update), packed(taken, count)))
    return Schedule(Stage("recompute", 0, packed(everything, num_recompute)), update)
