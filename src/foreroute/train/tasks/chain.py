"""A synthetic task with a verifiable answer: running results of digit arithmetic, modulo 10.

    prompt  3+4*2-5=        answer  3749;

The answer's i-th character is the result after the i-th operand; ";" ends it. Every token matters, and one slip spoils
the rest, as in a chain of reasoning.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.train.config import TaskConfig
from foreroute.train.tasks.task import Demonstration, Problem, Task

VOCABULARY = "0123456789+-*=;_"


class ChainTask(Task):
    """Random chains of digits, and the share of each answer that was right."""

    end_token = VOCABULARY.index(";")
    vocabulary_size = len(VOCABULARY)

    def __init__(self, config: TaskConfig) -> None:
        self._operands = config.min_operands, config.max_operands
        self.max_response_tokens = config.max_operands + 1

    def problems(self, count: int, step: int, number: int, rng: np.random.Generator) -> list[Problem]:
        shortest, longest = self._operands
        return sample_problems(rng, count, min_operands=shortest, max_operands=longest)

    def held_out(self, count: int, rng: np.random.Generator) -> list[Problem]:
        return self.problems(count, 0, 0, rng)

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        shortest, longest = self._operands
        operands = int(rng.integers(shortest, longest + 1))  # of one length, so that nothing is padded
        problems = sample_problems(rng, count, min_operands=operands, max_operands=operands)
        return [Demonstration(problem.tokens, encode(problem.row["answer"])) for problem in problems]

    def text(self, tokens: NDArray[np.int32]) -> str:
        return decode(tokens)

    def reward(self, problem: Problem, response: str) -> float:
        return right_share(problem.row["answer"], response)


def encode(text: str) -> NDArray[np.int32]:
    """Give int32 [T], one token per character."""
    return np.array([VOCABULARY.index(character) for character in text], np.int32)


def decode(tokens: NDArray[np.int32]) -> str:
    """Give the text of tokens."""
    return "".join(VOCABULARY[token] for token in tokens)


def sample_problems(
    rng: np.random.Generator, count: int, *, min_operands: int = 8, max_operands: int = 8
) -> list[Problem]:
    """Draw random chains of `min_operands` to `max_operands` digits."""
    return [_problem(rng, int(rng.integers(min_operands, max_operands + 1))) for _ in range(count)]


def right_share(answer: str, response: str) -> float:
    """Give the share of the answer's characters that are right before the response's first mistake, from 0 to 1.

    Whatever follows the end of the answer is a mistake.
    """
    right = 0
    for expected, given in zip(answer, response, strict=False):
        if expected != given:
            break
        right += 1
    return right / len(answer)


def _problem(rng: np.random.Generator, operands: int) -> Problem:
    digits = rng.integers(0, 10, operands)
    operators = rng.choice(list("+-*"), operands - 1)
    result, results, prompt = int(digits[0]), [int(digits[0])], str(digits[0])
    for operator, digit in zip(operators, digits[1:].tolist(), strict=True):
        result = {"+": result + digit, "-": result - digit, "*": result * digit}[str(operator)] % 10
        results.append(result)
        prompt += f"{operator}{digit}"
    return Problem(prompt + "=", encode(prompt + "="), {"answer": "".join(map(str, results)) + ";"})
