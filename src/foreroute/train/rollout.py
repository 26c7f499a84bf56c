"""Stage 1, rollout: the engine samples groups of responses, the verifier scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Generation, Sampling
from foreroute.engines.base import Engine
from foreroute.errors import FunctionError
from foreroute.train.config import TrainConfig
from foreroute.train.objective.advantages import group_advantages
from foreroute.train.ranks import Ranks
from foreroute.train.tasks import Problem, Task
from foreroute.train.turns import Conversations, converse, last_turn


@dataclass(frozen=True, eq=False)
class Experience:
    """A step's rollout.

    Attributes:
        generation: S = prompts * group size sequences, grouped by prompt.
        rewards_S: float64 [S], NaN where there is none.
        advantages_S: float64 [S].
        informative_S: bool [S], False in groups whose rewards are all equal or not all there; they are left out.
        max_response_tokens: the most that a response may have.
        sampled: what it took to get them.
    """

    generation: Generation
    rewards_S: NDArray[np.float64]
    advantages_S: NDArray[np.float64]
    informative_S: NDArray[np.bool_]
    max_response_tokens: int
    sampled: Sampled


@dataclass(frozen=True, eq=False)
class Sampled:
    """Rounds of dynamic sampling; the first alone without it.

    Attributes:
        first_rewards_S: float64 [S], of the first round. Those of what is trained on say less about the policy: later
            rounds replace what was always right, and always wrong.
        rounds: how many there were.
        responses: sampled in all of them.
        failures: why responses got no reward, in all of them.
    """

    first_rewards_S: NDArray[np.float64]
    rounds: int
    responses: int
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Scores:
    """What responses are worth.

    Attributes:
        rewards_S: float64 [S], NaN where there is none.
        failures: why not, for each of those, by its number.
    """

    rewards_S: NDArray[np.float64]
    failures: Mapping[int, str] = field(default_factory=dict)


def roll_out(engine: Engine, task: Task, config: TrainConfig, step: int, ranks: Ranks) -> Experience:
    """Sample this step's problems, which are dealt to the ranks in blocks, and the responses to those of this rank.

    Groups that teach nothing are replaced by those of new problems, which are dealt likewise, until this rank has none
    left or `rollout.max_rounds` are over (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2). No rank waits for
    another. Problems follow from the seed, the step and the round, responses from the number of ranks too.
    """
    group_size, kind = config.rollout.group_size, config.rl.advantage
    generation, scores = _sample_round(engine, task, config, step, ranks, 0)
    rewards, failures, rounds = scores.rewards_S, [*scores.failures.values()], 1
    advantages, informative = group_advantages(rewards, group_size, kind)
    while not informative.all() and rounds < config.rollout.max_rounds:
        new_generation, new = _sample_round(engine, task, config, step, ranks, rounds)
        order = _replaced(informative, group_advantages(new.rewards_S, group_size, kind)[1], group_size)
        generation = Generation.concatenate([generation, new_generation]).select(order)
        rewards = np.concatenate([rewards, new.rewards_S])[order]
        failures += new.failures.values()
        advantages, informative = group_advantages(rewards, group_size, kind)
        rounds += 1
    longest = task.max_turns * task.max_response_tokens
    sampled = Sampled(scores.rewards_S, rounds, rounds * len(rewards), tuple(failures))
    return Experience(generation, rewards, advantages, informative, longest, sampled)


def _sample_round(
    engine: Engine, task: Task, config: TrainConfig, step: int, ranks: Ranks, number: int
) -> tuple[Generation, Scores]:
    """The responses of this rank in one round, and their rewards."""
    rng = np.random.default_rng([config.seed, step, 1, number] if number else [config.seed, step, 1])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)) + ranks.rank)
    problems = task.problems(config.rollout.prompts, step, number, rng)
    each = len(problems) // ranks.size
    problems = problems[each * ranks.rank : each * (ranks.rank + 1)]
    sampling = Sampling(
        max_new_tokens=task.max_response_tokens,
        end_token=task.end_token,
        group_size=config.rollout.group_size,
        temperature=config.rollout.temperature,
    )
    conversations = converse(engine, task, problems, sampling, generator)
    return conversations.generation, scored(task, problems, conversations, config.rollout.group_size)


def _replaced(informative_S: NDArray[np.bool_], new_S: NDArray[np.bool_], group_size: int) -> NDArray[np.int64]:
    """int64 [S]: as many of the old sequences, and of the new ones behind them, with informative groups for others."""
    groups = np.arange(len(informative_S) // group_size)
    idle = np.flatnonzero(~informative_S[::group_size])
    better = np.flatnonzero(new_S[::group_size])[: len(idle)]
    groups[idle[: len(better)]] = len(groups) + better
    return np.asarray((groups[:, None] * group_size + np.arange(group_size)).reshape(-1))


def scored(task: Task, problems: Sequence[Problem], conversations: Conversations, group_size: int) -> Scores:
    """The rewards of responses, none for those whose environment failed.

    Raises:
        FunctionError: when not one of them got any.
    """
    scores = score(task, problems, conversations.generation, group_size)
    rewards_S = scores.rewards_S.copy()
    rewards_S[list(conversations.failures)] = np.nan
    failures = {**scores.failures, **conversations.failures}
    if np.isnan(rewards_S).all():
        raise FunctionError(f"none of {len(rewards_S)} responses got a reward. The first: {failures[0]}")
    return Scores(rewards_S, failures)


def score(task: Task, problems: Sequence[Problem], generation: Generation, group_size: int) -> Scores:
    """What the task makes of the last turn of each response."""
    rewards_S, failures = np.full(len(generation), np.nan), {}
    for s in range(len(generation)):
        try:
            rewards_S[s] = task.reward(*last_turn(task, problems[s // group_size], generation, s))
        except FunctionError as error:
            failures[s] = str(error)
    return Scores(rewards_S, failures)
