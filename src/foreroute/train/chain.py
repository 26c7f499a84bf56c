"""The interface of a task, and the built-in one: running results of digit arithmetic, modulo 10.

    prompt  3+4*2-5=        answer  3749;

The answer's i-th character is the result after the i-th operand; ";" ends it. Every token matters, and one slip spoils
the rest, as in a chain of reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from foreroute.train.config import TaskConfig

VOCABULARY = "0123456789+-*=;_"


@dataclass(frozen=True, eq=False)
class Problem:
    """A prompt as text, as tokens int32 [T], and what else is known of it: "answer" is the right answer of a chain."""

    prompt: str
    tokens: NDArray[np.int32]
    row: Mapping[str, Any] = field(default_factory=dict)


Demonstration = tuple[NDArray[np.int32], NDArray[np.int32]]
"""A prompt [T] and a right answer [T] with the end token, for supervised training."""


class Task(Protocol):
    """Problems, and what responses to them are worth. The trainer knows nothing else about a task."""

    end_token: int  # ends a response, and is part of it
    vocabulary_size: int  # of a model that is made for this task
    max_response_tokens: int  # the most that a response may have, its end token included
    data_digest: str = ""  # of what the problems are read from; empty where they are made

    def problems(self, count: int, step: int, rng: np.random.Generator) -> list[Problem]:
        """Give this many problems for a step, from 0. The randomness follows from the seed of the run and the step."""

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        """Give problems with right answers, for the warm start."""

    def rewards(self, problems: Sequence[Problem], responses: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """Give what responses are worth, float64 [S]; raises `FunctionError` where a user's function did not say."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer beside a model, if there is one."""
        return


class ChainTask(Task):
    """Random chains of digits; a response is worth the share of the answer that it has right."""

    end_token = VOCABULARY.index(";")
    vocabulary_size = len(VOCABULARY)

    def __init__(self, config: TaskConfig) -> None:
        self._shortest, self._longest = config.min_operands, config.max_operands
        self.max_response_tokens = config.max_operands + 1

    def problems(self, count: int, step: int, rng: np.random.Generator) -> list[Problem]:
        return [draw_chain(rng, int(rng.integers(self._shortest, self._longest + 1))) for _ in range(count)]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        operands = int(rng.integers(self._shortest, self._longest + 1))  # of one length, so that nothing is padded
        problems = [draw_chain(rng, operands) for _ in range(count)]
        return [(problem.tokens, encode(problem.row["answer"])) for problem in problems]

    def rewards(self, problems: Sequence[Problem], responses: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        worth_S = np.zeros(len(problems))
        for s, (problem, tokens) in enumerate(zip(problems, responses, strict=True)):
            worth_S[s] = right_share(encode(problem.row["answer"]), tokens)
        return worth_S


def encode(text: str) -> NDArray[np.int32]:
    """Give int32 [T], one token per character."""
    return np.array(list(map(VOCABULARY.index, text)), np.int32)


def draw_chain(rng: np.random.Generator, operands: int) -> Problem:
    """Draw a random chain of this many digits, with its answer."""
    digits = rng.integers(0, 10, operands)
    operators = rng.choice(list("+-*"), operands - 1)
    result, results, prompt = int(digits[0]), [int(digits[0])], str(digits[0])
    for operator, digit in zip(operators, digits[1:].tolist(), strict=True):
        result = {"+": result + digit, "-": result - digit, "*": result * digit}[str(operator)] % 10
        results.append(result)
        prompt += f"{operator}{digit}"
    return Problem(prompt + "=", encode(prompt + "="), {"answer": "".join(map(str, results)) + ";"})


def right_share(answer: Sequence[Any] | NDArray[Any], response: Sequence[Any] | NDArray[Any]) -> float:
    """Give the share of the answer's tokens or characters that come before the first mistake, from 0 to 1."""
    # no credit behind a mistake: the rest of a chain follows from what came before
    right = 0
    for expected, given in zip(answer, response, strict=False):
        if expected != given:
            break
        right += 1
    return right / len(answer)
