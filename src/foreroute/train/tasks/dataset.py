"""Problems from a data set, scored by a verifier or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.hf import Tokenizer
from foreroute.errors import ConfigError, DatasetError, FunctionError
from foreroute.files import blake2b_hex, read_file
from foreroute.train.config import TaskConfig, TrainConfig
from foreroute.train.tasks.function import UserFunction
from foreroute.train.tasks.jsonl import Row, parse_rows
from foreroute.train.tasks.task import Demonstration, Problem, Task
from foreroute.train.tasks.verifiers import make_verifier


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
        self.max_turns = config.task.max_turns
        self._started = ExitStack()
        self._reward, self._check = self._make_reward(config.task)
        self._environment = None
        if config.task.environment is not None:
            self._environment = self._start(config.task.environment, "task.environment")
        self._problems, self.skipped, self.data_digest = self._read(Path(str(config.task.data)))
        self._held_out: list[Problem] = []
        if config.evaluation.data is not None:
            path, count = Path(config.evaluation.data), config.evaluation.prompts
            self._held_out, _, digest = self._read(path)
            if len(self._held_out) < count:
                raise DatasetError(
                    f"{path} has {len(self._held_out)} problems; expected evaluation.prompts = {count} or more"
                )
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
        return self._reward(problem, response)

    def save_tokenizer(self, folder: Path) -> None:
        self._tokenizer.save(folder)

    def close(self) -> None:
        self._started.close()

    def _make_reward(self, config: TaskConfig) -> tuple[Callable[[Problem, str], float], Callable[[Row], None]]:
        """Give what scores a response, and what refuses rows that it cannot score responses to."""
        if ":" in str(config.reward):
            function = self._start(str(config.reward), "task.reward")
            return lambda problem, response: function.number(problem.prompt, response, problem.row), lambda row: None
        verifier = make_verifier(str(config.reward), config.pattern, timeout_s=config.function_timeout_s)
        self._started.callback(verifier.close)
        return lambda problem, response: float(verifier.is_right(problem.row, response)), verifier.check

    def _start(self, reference: str, key: str) -> UserFunction:
        timeout_s = self._config.function_timeout_s
        return self._started.enter_context(
            closing(UserFunction(reference, label=f"{key} = {reference!r}", timeout_s=timeout_s))
        )

    def _read(self, path: Path) -> tuple[list[Problem], int, str]:
        """Read the problems of a file, how many were too long, and the digest of what was read."""
        content = read_file(path, DatasetError)
        rows = parse_rows(content, str(path), self._check)
        problems, most = [self._problem(row) for row in rows], self._config.max_prompt_tokens
        short = [problem for problem in problems if len(problem.tokens) <= most]
        too_long = [problem for problem in problems if len(problem.tokens) > most]
        if too_long and (self._config.long_prompts == "error" or not short):
            raise DatasetError(
                f"{too_long[0].where}: the prompt has {len(too_long[0].tokens)} tokens, and {len(too_long)} of "
                f"{len(rows)} prompts have too many; expected at most task.max_prompt_tokens = {most}; raise it, or "
                'set task.long_prompts = "skip"'
            )
        return short, len(too_long), blake2b_hex(content)

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
