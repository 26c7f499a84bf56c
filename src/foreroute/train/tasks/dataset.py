"""Problems from a data set, scored by a verifier or a function of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from foreroute.adapters.hf import Tokenizer
from foreroute.errors import ConfigError, DatasetError, FunctionError
from foreroute.files import read_file
from foreroute.train.config import TrainConfig
from foreroute.train.tasks.function import UserFunction
from foreroute.train.tasks.jsonl import Row, parse_rows
from foreroute.train.tasks.task import Demonstration, Problem, Task
from foreroute.train.tasks.verifiers import Verifier, make_verifier


class DatasetTask(Task):
    """Rows of a JSONL file, in an order that follows from the seed.

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
        reward, timeout_s = str(config.task.reward), config.task.function_timeout_s
        self._verifier: Verifier | None = None
        self._function: UserFunction | None = None
        if ":" in reward:
            self._function = UserFunction(reward, label=f"task.reward = {reward!r}", timeout_s=timeout_s)
        else:
            self._verifier = make_verifier(reward, config.task.pattern, timeout_s=timeout_s)
        self.max_turns = config.task.max_turns
        self._environment = (
            None
            if config.task.environment is None
            else UserFunction(
                config.task.environment,
                label=f"task.environment = {config.task.environment!r}",
                timeout_s=timeout_s,
            )
        )
        self._problems, self.skipped, self.data_digest = self._read(Path(str(config.task.data)))
        self._held_out: list[Problem] = []
        if config.evaluation.data is not None:
            self._held_out, digest = self._read_held_out(Path(config.evaluation.data), config.evaluation.prompts)
            self.data_digest += f" {digest}"

    def problems(self, count: int, step: int, number: int, rng: np.random.Generator) -> list[Problem]:
        size = len(self._problems)
        if number:
            return [self._problems[int(i)] for i in rng.choice(size, count, replace=size < count)]
        places = np.arange(step * count, (step + 1) * count)
        orders = {int(e): np.random.default_rng([self._seed, int(e), 5]).permutation(size) for e in places // size}
        return [self._problems[int(orders[int(place // size)][place % size])] for place in places]

    def held_out(self, count: int, rng: np.random.Generator) -> list[Problem]:
        return self._held_out[:count]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        drawn = [self._problems[int(i)] for i in rng.choice(len(self._problems), count)]
        return [Demonstration(problem.tokens, self._answer(problem)) for problem in drawn]

    def text(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.text(tokens)

    def transcript(self, tokens: NDArray[np.int32]) -> str:
        return self._tokenizer.text(tokens, special=True)

    def tool_reply(self, problem: Problem, response: str) -> NDArray[np.int32] | None:
        if self._environment is None:
            return None
        text = self._environment.text(problem.prompt, response, problem.row)
        if text is None:
            return None
        most = self._config.max_tool_tokens
        try:
            tokens = self._tokenizer.continuation(text)
        except ConfigError as error:
            raise FunctionError(f"task.environment = {self._config.environment!r} returned text: {error}") from error
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
        for started in (self._function, self._verifier, self._environment):
            if started is not None:
                started.close()

    def _read(self, path: Path) -> tuple[list[Problem], int, str]:
        """Read the problems of a file, how many were too long, and the digest of what was read."""
        content = read_file(path, DatasetError)
        checks = () if self._verifier is None else (self._verifier.check,)
        rows = parse_rows(content, str(path), *checks)
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
        return short, len(too_long), xxhash.xxh3_128_hexdigest(content)

    def _read_held_out(self, path: Path, count: int) -> tuple[list[Problem], str]:
        problems, _, digest = self._read(path)
        if len(problems) < count:
            raise DatasetError(f"{path} has {len(problems)} problems; expected evaluation.prompts = {count} or more")
        return problems[:count], digest

    def _problem(self, row: Row) -> Problem:
        with _at(row.where):
            if "prompt" in row.values:
                prompt = str(row.values["prompt"])
                tokens = self._tokenizer.prompt(prompt)
            else:
                prompt = self._tokenizer.chat(row.values["messages"])
                tokens = self._tokenizer.continuation(prompt)  # the template wrote what comes first
        if not len(tokens):
            row.refuse(f"the tokenizer makes no token of {prompt[:60]!r}", "at least one")
        return Problem(prompt, tokens, row.values, row.where)

    def _answer(self, problem: Problem) -> NDArray[np.int32]:
        answer = problem.row.get("answer")
        if answer is None:
            raise ConfigError(
                f'a row of {self._config.data} has no "answer" to teach; set warm_start.max_steps = 0 to begin with RL'
            )
        with _at(problem.where):
            tokens = self._tokenizer.continuation(str(answer))
        return np.append(tokens, np.int32(self.end_token))


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the line in an error of the tokenizer."""
    try:
        yield
    except ConfigError as error:
        raise DatasetError(f"{where}: {error}") from error
