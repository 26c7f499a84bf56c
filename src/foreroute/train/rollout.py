"""Stage 1, rollout: the engine samples groups of responses, over one turn or several, and the task scores them.

Evaluation samples and scores in the same way, on problems that are held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Generation, Sampling
from foreroute.engines.base import Engine
from foreroute.errors import FunctionError
from foreroute.trace import extended
from foreroute.train.config import EvaluationConfig, RolloutConfig, TrainConfig
from foreroute.train.objective import group_advantages
from foreroute.train.ranks import Ranks
from foreroute.train.tasks import Problem, Task


@dataclass(frozen=True, eq=False)
class Experience:
    """A step's rollout with its rewards and advantages.

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
    sampled: SamplingRounds


@dataclass(frozen=True, eq=False)
class SamplingRounds:
    """What the rounds of dynamic sampling took; without it there is one.

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
    """Draw this step's problems, give each rank a block of them, and sample the responses to this rank's.

    Groups that teach nothing are replaced by those of new problems, divided likewise, until this rank has none left or
    `rollout.max_rounds` are over (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2). No rank waits for another.
    Problems follow from the seed, the step and the round, responses from the number of ranks too.

    Raises:
        FunctionError: when not one response got a reward, in all rounds.
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
    if np.isnan(rewards).all():
        raise FunctionError(f"none of {rounds * len(rewards)} responses got a reward. The first: {failures[0]}")
    longest = task.max_turns * task.max_response_tokens
    sampled = SamplingRounds(scores.rewards_S, rounds, rounds * len(rewards), tuple(failures))
    return Experience(generation, rewards, advantages, informative, longest, sampled)


def _sample_round(
    engine: Engine, task: Task, config: TrainConfig, step: int, ranks: Ranks, number: int
) -> tuple[Generation, Scores]:
    """Sample the responses of this rank in one round, and their rewards."""
    # the third number names the stream: 0 is the warm start's, 1 the rollout's, 2 the schedule's, 3 and 4 are for the
    # held-out problems and the responses of evaluation, and 5 is the order of a data set
    rng = np.random.default_rng([config.seed, step, 1, number] if number else [config.seed, step, 1])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)) + ranks.rank)
    problems = ranks.block(task.problems(config.rollout.prompts, step, number, rng))
    return sample(engine, task, problems, config.rollout, generator)


def _replaced(informative_S: NDArray[np.bool_], new_S: NDArray[np.bool_], group_size: int) -> NDArray[np.int64]:
    """Choose int64 [S], S of the old sequences and of the new ones behind them: informative groups replace others."""
    groups = np.arange(len(informative_S) // group_size)
    idle = np.flatnonzero(~informative_S[::group_size])
    better = np.flatnonzero(new_S[::group_size])[: len(idle)]
    # the new groups are numbered behind the old ones
    groups[idle[: len(better)]] = len(groups) + better
    return np.asarray((groups[:, None] * group_size + np.arange(group_size)).reshape(-1))


def sample(
    engine: Engine,
    task: Task,
    problems: Sequence[Problem],
    settings: RolloutConfig | EvaluationConfig,
    generator: torch.Generator,
) -> tuple[Generation, Scores]:
    """Sample responses and score them; those whose environment failed get no reward.

    Returns:
        S = problems * group size sequences, grouped by problem; and what they are worth.
    """
    sampling = Sampling(
        task.max_response_tokens,
        task.end_token,
        settings.group_size,
        settings.temperature,
        **({} if isinstance(settings, EvaluationConfig) else settings.truncation),
    )
    generation, failed = converse(engine, task, problems, sampling, generator)
    scores = score(task, problems, generation, sampling.group_size)
    rewards_S, failures = scores.rewards_S.copy(), {**scores.failures, **failed}
    rewards_S[list(failed)] = np.nan
    return generation, Scores(rewards_S, failures)


def score(task: Task, problems: Sequence[Problem], generation: Generation, group_size: int) -> Scores:
    """Score the last turn of each response, as the task does."""
    rewards_S, failures = np.full(len(generation), np.nan), {}
    for s in range(len(generation)):
        try:
            rewards_S[s] = task.reward(*last_turn(task, problems[s // group_size], generation, s))
        except FunctionError as error:
            failures[s] = str(error)
    return Scores(rewards_S, failures)


def converse(
    engine: Engine, task: Task, problems: Sequence[Problem], sampling: Sampling, generator: torch.Generator
) -> tuple[Generation, dict[int, str]]:
    """Sample responses, of up to `task.max_turns` turns where the task has an environment.

    A turn that was cut before its end token is the last. Each turn is sampled after all tokens so far; rows that an
    earlier turn routed keep those routes, because the log-probs of their tokens come from there.

    Returns:
        S = problems * group size sequences, grouped by problem; and why the environment failed in a sequence, which
        ended there, by its number.
    """
    generation = engine.generate([problem.tokens for problem in problems], sampling, generator)
    failures: dict[int, str] = {}
    open_S = np.arange(len(generation))
    # open_S are the sequences whose last turn a tool has replied to; the others have ended
    for _ in range(task.max_turns - 1):
        replies: dict[int, NDArray[np.int32]] = {}
        for s in map(int, open_S):
            if generation.trace.tokens(s)[-1] != task.end_token:
                continue
            try:
                tokens = task.tool_reply(*last_turn(task, problems[s // sampling.group_size], generation, s))
            except FunctionError as error:
                failures[s] = str(error)
                continue
            if tokens is not None:
                replies[s] = tokens
        if not replies:
            break
        open_S = np.array(list(replies))
        longer = _another_turn(engine, generation.select(open_S), list(replies.values()), sampling, generator)
        # each longer sequence, appended at the end, takes the place of the one that it extends
        order = np.arange(len(generation))
        order[open_S] = len(generation) + np.arange(len(open_S))
        generation = Generation.concatenate([generation, longer]).select(order)
    return generation, failures


def last_turn(task: Task, problem: Problem, generation: Generation, sequence: int) -> tuple[Problem, str]:
    """Give the problem with all that came before the last turn as its prompt, and the text of that turn."""
    before, last = generation.last_turn(sequence)
    if len(before):
        problem = replace(problem, prompt=problem.prompt + task.transcript(before))
    return problem, task.text(last)


def _another_turn(
    engine: Engine,
    before: Generation,
    replies: Sequence[NDArray[np.int32]],
    sampling: Sampling,
    generator: torch.Generator,
) -> Generation:
    """Extend each sequence by the tokens of its tool's reply and one more turn."""
    prompts = [np.concatenate([before.trace.tokens(s), tokens]) for s, tokens in enumerate(replies)]
    later = engine.generate(prompts, replace(sampling, group_size=1), generator)
    sampled, logprobs = [], []
    for s, tokens in enumerate(replies):
        earlier, last = before.select([s]), later.select([s])
        sampled += [earlier.sampled_N, np.zeros(len(tokens), bool), np.ones(later.response_lengths[s], bool)]
        logprobs += [earlier.logprobs_R, last.logprobs_R]
    trace = extended(before.trace, later.trace)
    return Generation(trace, before.prompt_lengths, np.concatenate(logprobs), np.concatenate(sampled))


def evaluate(
    engine: Engine, task: Task, config: TrainConfig, step: int, ranks: Ranks
) -> tuple[Scores, NDArray[np.int64]]:
    """Sample and score responses to this rank's block of the held-out problems, with the weights that are loaded.

    The problems follow from the seed, responses at a temperature from the step and the number of ranks too.

    Returns:
        What S responses are worth, and their lengths, int64 [S].

    Raises:
        FunctionError: when not one response got a reward.
    """
    # the same problems each time: step 0 in every step
    problems = task.held_out(config.evaluation.prompts, np.random.default_rng([config.seed, 0, 3]))
    seed = int(np.random.default_rng([config.seed, step, 4]).integers(2**62))
    generator = torch.Generator().manual_seed(seed + ranks.rank)
    generation, scores = sample(engine, task, ranks.block(problems), config.evaluation, generator)
    if np.isnan(scores.rewards_S).all():
        raise FunctionError(
            f"none of {len(generation)} held-out responses got a reward, in the evaluation of step {step}. The first: "
            f"{scores.failures[0]}"
        )
    return scores, generation.response_lengths


def evaluation_record(parts: Sequence[tuple[Scores, NDArray[np.int64]]]) -> dict[str, Any]:
    """Make the record "evaluation" of a step, from what all ranks found; empty without parts."""
    if not parts:
        return {}
    rewards_S = np.concatenate([scores.rewards_S for scores, _ in parts])
    failures = [failure for scores, _ in parts for failure in scores.failures.values()]
    scored_S = rewards_S[~np.isnan(rewards_S)]
    record = {
        "responses": len(rewards_S),
        "reward_mean": float(scored_S.mean()),
        "reward_std": float(scored_S.std()),
        "exact_share": float((scored_S == 1).mean()),
        "response_tokens_mean": float(np.concatenate([lengths_S for _, lengths_S in parts]).mean()),
        "reward_failures": len(failures),
    }
    return {"evaluation": record | ({"reward_failure": failures[0]} if failures else {})}
