"""Evaluation: rewards of the policy on problems that it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Sampling
from foreroute.engines.base import Engine
from foreroute.train.config import TrainConfig
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Scores, scored
from foreroute.train.tasks import Task
from foreroute.train.turns import converse


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What one rank saw.

    Attributes:
        scores: of its S responses.
        response_lengths: int64 [S].
    """

    scores: Scores
    response_lengths: NDArray[np.int64]


def evaluate(engine: Engine, task: Task, config: TrainConfig, step: int, ranks: Ranks) -> Evaluated:
    """Sample and score responses to this rank's block of the held-out problems, with the weights that are loaded.

    The problems follow from the seed, responses at a temperature from the step and the number of ranks too.

    Raises:
        FunctionError: when not one response got a reward.
    """
    settings = config.evaluation
    # streams 0 to 2 and 5 of a step belong to the warm start, the rollout, the schedule and the order of a data set
    problems = task.held_out(settings.prompts, np.random.default_rng([config.seed, 0, 3]))
    each = len(problems) // ranks.size
    mine = problems[each * ranks.rank : each * (ranks.rank + 1)]
    seed = int(np.random.default_rng([config.seed, step, 4]).integers(2**62))
    sampling = Sampling(task.max_response_tokens, task.end_token, settings.group_size, settings.temperature)
    generator = torch.Generator().manual_seed(seed + ranks.rank)
    conversations = converse(engine, task, mine, sampling, generator)
    scores = scored(task, mine, conversations, settings.group_size)
    return Evaluated(scores, conversations.generation.response_lengths)


def evaluation_record(parts: Sequence[Evaluated]) -> dict[str, Any]:
    """The record "evaluation" of a step, from what all ranks saw; empty without parts."""
    if not parts:
        return {}
    rewards_S = np.concatenate([part.scores.rewards_S for part in parts])
    failures = [failure for part in parts for failure in part.scores.failures.values()]
    scored_S = rewards_S[~np.isnan(rewards_S)]
    record = {
        "responses": len(rewards_S),
        "reward_mean": float(scored_S.mean()),
        "reward_std": float(scored_S.std()),
        "exact_share": float((scored_S == 1).mean()),
        "response_tokens_mean": float(np.concatenate([part.response_lengths for part in parts]).mean()),
        "reward_failures": len(failures),
    }
    return {"evaluation": record | ({"reward_failure": failures[0]} if failures else {})}
