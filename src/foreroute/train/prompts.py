"""Prompts of your own, from a JSONL file, and your reward for a batch of responses to them.

    {"prompt": "What is 3 * 4?", "answer": "12"}
    {"messages": [{"role": "user", "content": "What is 3 * 4?"}], "answer": 12}

Every line is checked before the first step. Keys beside "prompt" or "messages" are the reward's.
"""

from __future__ import annotations

import math
import os
import runpy
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from foreroute.adapters.hf.loading import first_line, load_tokenizer
from foreroute.errors import ConfigError, DatasetError, FunctionError
from foreroute.files.config_file import Section, checked
from foreroute.files.container import blake2b_hex
from foreroute.files.regular import parse_json, read_file
from foreroute.train.chain import ChainTask, Demonstration, Problem, Task
from foreroute.train.config import TaskConfig, TrainConfig

Reward = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]
"""Takes prompts, responses and rows, one of each for a response; returns a finite number for each."""


def make_task(config: TrainConfig) -> Task:
    """Make the task that a configuration asks for.

    Raises `ConfigError` without a tokenizer or a reward, and `DatasetError` for a line that is not what it must be.
    """
    if config.task.data is None:
        return ChainTask(config.task)
    return PromptTask(config.task, Tokenizer(Path(str(config.model.tokenizer_folder))), config.seed)


class PromptTask(Task):
    """Rows of a file, in an order that follows from the seed. Raises as `make_task`."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self.end_token, self.vocabulary_size = tokenizer.end_token, tokenizer.size
        self.max_response_tokens = config.max_response_tokens
        self._reward = load_reward(str(config.reward))
        # every line now, and not in the middle of a run
        content = read_file(Path(str(config.data)), DatasetError)
        lines = content.removesuffix(b"\n").split(b"\n")
        self._problems = [self._problem(f"{config.data}, line {number}", line) for number, line in enumerate(lines, 1)]
        self.data_digest = blake2b_hex(content)

    def problems(self, count: int, step: int, rng: np.random.Generator) -> list[Problem]:
        # step s takes the rows from s * count on, of one permutation after another, so that a run goes on at any step
        size = len(self._problems)
        epoch_S, row_S = np.divmod(np.arange(step * count, (step + 1) * count), size)
        # a shuffle of the whole file, so once for each epoch that the step is in
        orders = {e: np.random.default_rng([self._seed, e, 5]).permutation(size) for e in np.unique(epoch_S).tolist()}
        return [self._problems[orders[e][row]] for e, row in zip(epoch_S.tolist(), row_S.tolist(), strict=True)]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[Demonstration]:
        raise ConfigError("task.data has no right answers to teach; leave warm_start out")

    def rewards(self, problems: Sequence[Problem], responses: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        texts = [self._tokenizer.text(tokens) for tokens in responses]
        name, prompts = f"task.reward = {self._config.reward!r}", [problem.prompt for problem in problems]
        rows = [dict(problem.row) for problem in problems]  # copies, which a reward may change
        try:
            values = list(self._reward(prompts, texts, rows))
        except Exception as error:  # a function of the user's raises what it likes
            raise FunctionError(f"{name} raised {type(error).__name__}: {error}") from error
        if len(values) != len(texts):
            raise FunctionError(f"{name} returned {len(values)} rewards for {len(texts)} responses; expected one each")
        for text, value in zip(texts, values, strict=True):
            number: object = value
            if not isinstance(number, Real) or not math.isfinite(number):
                raise FunctionError(f"{name} returned {value!r:.60} for {text!r:.60}; expected a finite number")
        return np.array(values, np.float64)

    def save_tokenizer(self, folder: Path) -> None:
        self._tokenizer.save(folder)

    def _problem(self, where: str, line: bytes) -> Problem:
        row = parse_row(where, line)
        most = self._config.max_prompt_tokens
        try:
            prompt = row["prompt"] if row.get("prompt") is not None else self._tokenizer.chat(row["messages"])
            # a chat template wrote what comes first
            tokens = self._tokenizer.tokens(prompt, special=row.get("prompt") is not None)
        except ConfigError as error:
            raise DatasetError(f"{where}: {error}") from error
        if not 1 <= len(tokens) <= most:
            raise DatasetError(
                f"{where}: the prompt has {len(tokens)} tokens; expected 1 to task.max_prompt_tokens = {most}; raise "
                "it, or shorten the prompt"
            )
        return Problem(prompt, tokens, row)


def load_reward(reference: str) -> Reward:
    """Import the reward "file.py:function", which runs in this process, or raise `ConfigError`."""
    file, _, name = reference.rpartition(":")
    path = Path(file).absolute()
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name that is too long
        raise ConfigError(f"task.reward = {reference!r}: {path} is no file")
    try:
        function = runpy.run_path(str(path)).get(name)
    except Exception as error:  # whatever the file raises
        raise ConfigError(f"task.reward = {reference!r}: importing raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"task.reward = {reference!r}: {path} has no function {name}")
    return function  # type: ignore[no-any-return]


class Message(Section):
    """A message of a chat."""

    role: str
    content: str


class Row(Section):
    """Fields of a line beside keys of the reward."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Row:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected one of prompt and messages")
        return self


def parse_row(where: str, line: bytes) -> dict[str, Any]:
    """Read a line: an object with either a prompt or messages."""
    row = parse_json(line, DatasetError, name=where)
    if not isinstance(row, dict):
        raise DatasetError(f'{where}: {row!r:.60} is no object; expected one such as {{"prompt": "…", "answer": "…"}}')
    try:
        checked(Row, {key: row[key] for key in Row.model_fields if key in row}, source=where)
    except ConfigError as error:
        raise DatasetError(str(error)) from error
    return row


class Tokenizer:
    """A Hugging Face tokenizer of a folder with an end token. Nothing is downloaded, and no code in it is run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner = load_tokenizer(folder)
        if self._inner.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {folder} has no end token, so no response would end; name one as eos_token in its "
                "tokenizer_config.json"
            )
        self.end_token = int(self._inner.eos_token_id)
        # not the number of tokens: some vocabularies have gaps
        self.size = max(self._inner.get_vocab().values()) + 1

    def tokens(self, text: str, *, special: bool) -> NDArray[np.int32]:
        """Encode a text as int32 [T], with `special` tokens around it where it begins a sequence."""
        try:
            return np.array(self._inner(text, add_special_tokens=special)["input_ids"], np.int32)
        # the library raises bare exceptions, for a character that its vocabulary lacks and for a lone surrogate
        except Exception as error:
            raise ConfigError(
                f"the tokenizer in {self._folder} makes no tokens of {text[:60]!r} ({first_line(error)})"
            ) from error

    def chat(self, messages: Sequence[Any]) -> str:
        """Apply the chat template to messages, up to where the answer begins."""
        if self._inner.chat_template is None:
            raise ConfigError(
                f'the tokenizer in {self._folder} has no chat template; give "prompt" instead of "messages"'
            )
        try:
            return str(self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs, which raise what they like
            raise ConfigError(f"the chat template in {self._folder} refuses these messages: {error}") from error

    def text(self, tokens: ArrayLike) -> str:
        """Decode tokens without special ones."""
        return str(self._inner.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write its files into a folder, beside what is there."""
        self._inner.save_pretrained(folder)
