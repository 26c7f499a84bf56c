"""The interface of a task. The trainer knows nothing else about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Problem:
    """Something to answer.

    Attributes:
        prompt: as text.
        tokens: int32 [T], the prompt as the model is given it.
        row: what else is known of it, by name; "answer" is a right answer.
        where: file and line that it is from, for messages.
    """

    prompt: str
    tokens: NDArray[np.int32]
    row: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A problem with a right answer, for supervised training.

    Attributes:
        prompt: int32 [T].
        answer: int32 [T], with the end token.
    """

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


class Task(Protocol):
    """Problems, and what responses to them are worth.

    Attributes:
        end_token: ends a response, and is part of it.
        vocabulary_size: of a model that is made for this task.
        max_response_tokens: the most that one turn of a response may have, its end token included.
        max_turns: the most turns that a response may have; 1 without an environment.
        skipped: problems that were left out as too long.
        data_digest: of what the problems are read from; empty where they are made.
    """

    end_token: int
    vocabulary_size: int
    max_response_tokens: int
    max_turns: int = 1
    skipped: int = 0
    data_digest: str = ""

    def problems(self, count: int, step: int, number: int, rng: np.random.Generator) -> list[Problem]:
        """Give so many problems for a round of a step, both from 0.

        `number` is 0 unless sampling is dynamic. The randomness follows from the seed of the run and the two numbers.
        """

    def held_out(self, count: int, rng: np.random.Generator) -> list[Problem]:
        """Give so many problems to evaluate on, with the same randomness each time."""

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        """Give problems with right answers, for the warm start.

        Raises:
            ConfigError: when no right answers are known.
        """

    def text(self, tokens: NDArray[np.int32]) -> str:
        """Give the text of a response, without what marks its end, where that is no text."""

    def transcript(self, tokens: NDArray[np.int32]) -> str:
        """Give all that tokens say, with what marks turns and their ends."""
        return self.text(tokens)

    def tool_reply(self, problem: Problem, response: str) -> NDArray[np.int32] | None:
        """Give what a tool says to a turn, int32 [T] of at least one token; None where the response ends.

        All that came before the turn is the prompt of `problem`.

        Raises:
            FunctionError: when the environment did not say.
        """
        return None

    def reward(self, problem: Problem, response: str) -> float:
        """Give what a response is worth: its last turn, where all that came before is the prompt of `problem`.

        Raises:
            FunctionError: when a function of the user's did not say.
        """

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer beside a model, if there is one."""
        return

    def close(self) -> None:
        """End the processes that were started to score. May be called again."""
        return
