"""Problems from a data set, scored by a verifier or a function of the user's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from foreroute.adapters.hf import Tokenizer
from foreroute.errors import ConfigError, DatasetError, FunctionError
from foreroute.train.config import TrainConfig
from foreroute.train.tasks.function import UserFunction
from foreroute.train.tasks.rows import Row, read_rows
from foreroute.train.tasks.task import Lesson, Problem
from foreroute.train.tasks.verifiers import Verifier, make_verifier


class DatasetTask:
    """Rows of a JSONL file, in an order that follows from the seed; implements `Task`.

    Step s takes the rows from s * prompts on, of one permutation of the file after another, so that a run can go on at
    any step. Further rounds of dynamic sampling draw from the whole file at random.

    Args:
        config: of the run.
        tokenizer: of the model.

    Raises:
        DatasetError: when a file cannot be read, has too few problems, or a line is not what it must be.
        ConfigError: when the reward cannot be had.

    Attributes:
        skipped: prompts that were left out because they are longer than `max_prompt_tokens`.
    """

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer, self._seed = config.task, tokenizer, config.seed
        self.end_token = tokenizer.end_token
        self.vocabulary_size = tokenizer.size
        self.max_response_tokens = config.task.max_response_tokens
        reward = str(config.task.reward)
        self._verifier: Verifier | None = None
        self._function: UserFunction | None = None
        if ":" in reward:
            self._function = UserFunction(reward, what="task.reward", timeout_s=config.task.function_timeout_s)
        else:
            self._verifier = make_verifier(reward, config.task.pattern)
        self.max_turns = config.task.max_turns
        self._environment = (
            None
            if config.task.environment is None
            else UserFunction(
                config.task.environment, what="task.environment", timeout_s=config.task.function_timeout_s
            )
        )
        self._problems, self.skipped = self._read(Path(str(config.task.data)))
        self._held_out: list[Problem] = []
        if config.evaluation.data is not None:
            self._held_out = self._read_held_out(Path(config.evaluation.data), config.evaluation.prompts)
        read = [Path(path).read_bytes() for path in (config.task.data, config.evaluation.data) if path is not None]
        self.data_digest = " ".join(xxhash.xxh3_128_hexdigest(content) for content in read)

    def problems(self, count: int, step: int, number: int, rng: np.random.Generator) -> list[Problem]:
        size = len(self._problems)
        if number:
            return [self._problems[int(i)] for i in rng.choice(size, count, replace=size < count)]
        places = np.arange(step * count, (step + 1) * count)
        orders = {int(e): np.random.default_rng([self._seed, int(e), 5]).permutation(size) for e in places // size}
        return [self._problems[int(orders[int(place // size)][place % size])] for place in places]

    def held_out(self, count: int, rng: np.random.Generator) -> list[Problem]:
        return self._held_out[:count]

    def lessons(self, count: int, rng: np.random.Generator) -> list[Lesson]:
        drawn = [self._problems[int(i)] for i in rng.choice(len(self._problems), count)]
        return [Lesson(problem.tokens, self._answer(problem)) for problem in drawn]

    def text(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.text(tokens)

    def transcript(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.text(tokens, special=True)

    def follow(self, problem: Problem, response: str) -> NDArray[np.int32] | None:
        if self._environment is None:
            return None
        text = self._environment.text(problem.prompt, response, problem.row)
        if text is None:
            return None
        tokens, most = self._tokenizer.continuation(text), self._config.max_tool_tokens
        if not 1 <= len(tokens) <= most:
            raise FunctionError(
                f"task.environment = {self._config.environment!r} returned text of {len(tokens)} tokens; expected 1 to "
                f"task.max_tool_tokens = {most}, or None to end the response"
            )
        return tokens

    def reward(self, problem: Problem, response: str) -> float:
        if self._function is not None:
            return self._function.number(problem.prompt, response, problem.row)
        assert self._verifier is not None, "there is a function or a verifier"
        return float(self._verifier.is_right(problem.row, response))

    def save_tokenizer(self, folder: Path) -> None:
        self._tokenizer.save(folder)

    def close(self) -> None:
        for function in (self._function, self._environment):
            if function is not None:
                function.close()

    def _read(self, path: Path) -> tuple[list[Problem], int]:
        """The problems of a file, and how many were too long."""
        rows = read_rows(path) if self._verifier is None else read_rows(path, self._verifier.check)
        problems = [(row, self._problem(row)) for row in rows]
        most = self._config.max_prompt_tokens
        short = [problem for _, problem in problems if len(problem.tokens) <= most]
        too_long = [(row, len(problem.tokens)) for row, problem in problems if len(problem.tokens) > most]
        if too_long and (self._config.long_prompts == "error" or not short):
            row, length = too_long[0]
            row.refuse(
                f"the prompt has {length} tokens, and {len(too_long)} of {len(rows)} prompts have too many",
                f'at most task.max_prompt_tokens = {most}; raise it, or set task.long_prompts = "skip"',
            )
        return short, len(too_long)

    def _read_held_out(self, path: Path, count: int) -> list[Problem]:
        problems, _ = self._read(path)
        if len(problems) < count:
            raise DatasetError(f"{path} has {len(problems)} problems; expected evaluation.prompts = {count} or more")
        return problems[:count]

    def _problem(self, row: Row) -> Problem:
        if "prompt" in row.values:
            prompt = str(row.values["prompt"])
            tokens = self._tokenizer.prompt(prompt)
        else:
            try:
                prompt = self._tokenizer.chat(row.values["messages"])
            except ConfigError as error:
                raise DatasetError(f"{row.where}: {error}") from error
            tokens = self._tokenizer.continuation(prompt)  # the template wrote what comes first
        if not len(tokens):
            row.refuse(f"the tokenizer makes no token of {prompt[:60]!r}", "at least one")
        return Problem(prompt, tokens, row.values)

    def _answer(self, problem: Problem) -> NDArray[np.int32]:
        answer = problem.row.get("answer")
        if answer is None:
            raise ConfigError(
                f'a row of {self._config.data} has no "answer" to teach; set warm_start.max_steps = 0 to begin with RL'
            )
        tokens = self._tokenizer.continuation(str(answer))
        return np.append(tokens, np.int32(self.end_token))
