"""Sampling over several turns: the engine's, each followed by the text of a tool until there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Generation, Sampling
from foreroute.engines.base import Engine
from foreroute.errors import FunctionError
from foreroute.trace import extended
from foreroute.train.tasks import Problem, Task


@dataclass(frozen=True, eq=False)
class Conversations:
    """What was sampled.

    Attributes:
        generation: S = problems * group size sequences, grouped by problem.
        failures: why the environment failed in a sequence, which ended there, by its number.
    """

    generation: Generation
    failures: dict[int, str]


def converse(
    engine: Engine, task: Task, problems: Sequence[Problem], sampling: Sampling, generator: torch.Generator
) -> Conversations:
    """Sample responses, of up to `task.max_turns` turns where the task has an environment.

    A turn that was cut before its end token is the last. Each turn is sampled after all tokens so far; rows that an
    earlier turn routed keep those routes, because the log-probs of their tokens come from there.
    """
    generation = engine.generate([problem.tokens for problem in problems], sampling, generator)
    failures: dict[int, str] = {}
    open_S = np.arange(len(generation))
    for _ in range(task.max_turns - 1):
        follows: dict[int, NDArray[np.int32]] = {}
        for s in map(int, open_S):
            if generation.trace.tokens(s)[-1] != task.end_token:
                continue
            try:
                tokens = task.follow(*last_turn(task, problems[s // sampling.group_size], generation, s))
            except FunctionError as error:
                failures[s] = str(error)
                continue
            if tokens is not None:
                follows[s] = tokens
        if not follows:
            break
        open_S = np.array(list(follows))
        longer = _another_turn(engine, generation.select(open_S), list(follows.values()), sampling, generator)
        order = np.arange(len(generation))
        order[open_S] = len(generation) + np.arange(len(open_S))
        generation = Generation.concatenate([generation, longer]).select(order)
    return Conversations(generation, failures)


def last_turn(task: Task, problem: Problem, generation: Generation, sequence: int) -> tuple[Problem, str]:
    """The text of the last turn of a response, and the problem with all that came before as its prompt."""
    before, last = generation.last_turn(sequence)
    if len(before):
        problem = replace(problem, prompt=problem.prompt + task.transcript(before))
    return problem, task.text(last)


def _another_turn(
    engine: Engine,
    before: Generation,
    follows: Sequence[NDArray[np.int32]],
    sampling: Sampling,
    generator: torch.Generator,
) -> Generation:
    """The sequences, each with the tokens that follow and one more turn."""
    prompts = [np.concatenate([before.trace.tokens(s), tokens]) for s, tokens in enumerate(follows)]
    later = engine.generate(prompts, replace(sampling, group_size=1), generator)
    parts = [(before, later)[turn].select([s]) for s in range(len(before)) for turn in (0, 1)]
    sampled = []
    for s, tokens in enumerate(follows):
        sampled += [
            parts[2 * s].sampled_N,
            np.zeros(len(tokens), np.bool_),
            np.ones(later.response_lengths[s], np.bool_),
        ]
    return Generation(
        extended(before.trace, later.trace),
        before.prompt_lengths,
        np.concatenate([part.logprobs_R for part in parts]),
        np.concatenate(sampled),
    )
