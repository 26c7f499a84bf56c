"""Stage 1, rollout: the engine samples groups of responses, the verifier scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Generation, Sampling
from foreroute.train.config import TrainConfig
from foreroute.train.ranks import Ranks
from foreroute.train.task import END_TOKEN, Problem, decode, encode, reward, sample_problems


class Engine(Protocol):
    """What samples: the embedded engine, or one that runs elsewhere."""

    weight_version: int

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights; what follows is stamped with `version`."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt, grouped by prompt."""

    def close(self) -> None:
        """End what was started to sample. May be called again."""


@dataclass(frozen=True, eq=False)
class Experience:
    """A step's rollout.

    Attributes:
        generation: S = prompts * group size sequences, grouped by prompt.
        rewards_S: float64 [S].
        advantages_S: float64 [S].
        informative_S: bool [S], False in groups whose rewards are all equal; they teach nothing and are left out.
    """

    generation: Generation
    rewards_S: NDArray[np.float64]
    advantages_S: NDArray[np.float64]
    informative_S: NDArray[np.bool_]


def roll_out(engine: Engine, config: TrainConfig, step: int, ranks: Ranks) -> Experience:
    """Sample this step's problems, which are dealt to the ranks in blocks, and the responses to those of this rank.

    Problems follow from the seed and the step alone, responses from the number of ranks too.
    """
    rng = np.random.default_rng([config.seed, step, 1])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)) + ranks.rank)
    task = config.task
    problems = sample_problems(
        rng, config.rollout.prompts, min_operands=task.min_operands, max_operands=task.max_operands
    )
    each = len(problems) // ranks.size
    problems = problems[each * ranks.rank : each * (ranks.rank + 1)]
    generation = engine.generate(
        [encode(problem.prompt) for problem in problems],
        Sampling(
            max_new_tokens=task.max_operands + 1,
            end_token=END_TOKEN,
            group_size=config.rollout.group_size,
            temperature=config.rollout.temperature,
        ),
        generator,
    )
    rewards = score(problems, generation, config.rollout.group_size)
    return Experience(generation, rewards, *group_advantages(rewards, config.rollout.group_size))


def score(problems: Sequence[Problem], generation: Generation, group_size: int) -> NDArray[np.float64]:
    """float64 [S], the verifier's reward of each response."""
    return np.array(
        [reward(problems[s // group_size], decode(generation.response(s))) for s in range(len(generation))], np.float64
    )


def group_advantages(rewards_S: NDArray[np.float64], group_size: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Reward minus the group's mean, over its standard deviation, and whether the group has any.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.

    Returns:
        float64 [S], 0 in a group whose rewards are all equal; and bool [S], False there.
    """
    groups = rewards_S.reshape(-1, group_size)
    differs = (groups != groups[:, :1]).any(axis=1, keepdims=True)
    centred = groups - groups.mean(axis=1, keepdims=True)
    deviation = np.where(differs, groups.std(axis=1, keepdims=True), 1.0)
    advantages = np.where(differs, centred / deviation, 0.0)
    return advantages.reshape(-1), np.broadcast_to(differs, groups.shape).reshape(-1)
