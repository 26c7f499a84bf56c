"""The configuration of what is learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import Count, Section, Timeout, Tokens
from foreroute.train.config.unused_keys import refuse_unused

BUILT_IN = ("exact_match", "regex", "arithmetic", "countdown")
"""Verifiers that a reward can name."""


class TaskConfig(Section):
    """Built-in chains of digit arithmetic, or a data set."""

    kind: Literal["chain", "dataset"] = "chain"
    """Generated chains of digits, or a file."""
    min_operands: Count = 8
    """chain: digits of the shortest."""
    max_operands: Count = 8
    """chain: digits of the longest."""
    data: str | None = None
    """dataset: JSONL file, one problem per line."""
    reward: str | None = None
    """dataset: "exact_match", "regex", "arithmetic", "countdown" or "file.py:function"."""
    pattern: str | None = None
    """regex: finds the answer, or its first group does."""
    environment: str | None = None
    """dataset: "file.py:function" that answers a turn."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 1
    """environment: turns of a response."""
    max_tool_tokens: Tokens = 256
    """environment: tokens of one answer."""
    function_timeout_s: Timeout = 10.0
    """Limit of a call of your function, or of a search for the pattern."""
    max_prompt_tokens: Tokens = 512
    """dataset: limit of a prompt."""
    max_response_tokens: Tokens = 512
    """dataset: limit of one turn; a longer one is cut and ends the response."""
    long_prompts: Literal["error", "skip"] = "error"
    """dataset: for longer prompts."""

    @property
    def longest_input(self) -> int:
        """Tokens of the longest sequence that is put into the model; the last token of a sequence is not."""
        if self.kind == "dataset":
            tools = (self.max_turns - 1) * self.max_tool_tokens
            return self.max_prompt_tokens + self.max_turns * self.max_response_tokens + tools - 1
        return 3 * self.max_operands  # operands, operators and "=", then one result each

    @model_validator(mode="after")
    def _of_its_kind(self) -> TaskConfig:
        if self.min_operands > self.max_operands:
            raise ValueError(f"min_operands = {self.min_operands} exceeds max_operands = {self.max_operands}")
        other = {"chain": _DATASET_KEYS, "dataset": _CHAIN_KEYS}[self.kind]
        refuse_unused(self, other, f'with kind = "{self.kind}"; leave out what is of the other kind')
        if self.kind == "dataset" and (self.data is None or self.reward is None):
            raise ValueError('kind = "dataset" needs data, a JSONL file, and reward')
        return self

    @model_validator(mode="after")
    def _functions_known(self) -> TaskConfig:
        if self.reward is not None and self.reward not in BUILT_IN and not self.reward.partition(".py:")[2]:
            raise ValueError(
                f'reward = "{self.reward}" is no verifier ({", ".join(BUILT_IN)}); a function of your own is written '
                '"file.py:function"'
            )
        if self.environment is not None and not self.environment.partition(".py:")[2]:
            raise ValueError(f'environment = "{self.environment}" is no function; write "file.py:function"')
        if (self.environment is None) != (self.max_turns == 1):
            raise ValueError("an environment and max_turns of 2 or more go together; set both, or neither")
        if self.environment is None:
            refuse_unused(self, ["max_tool_tokens"], "without an environment; leave it out")
            if self.reward in BUILT_IN and self.reward != "regex":
                refuse_unused(self, ["function_timeout_s"], "without a function of your own or a pattern; leave it out")
        if (self.reward == "regex") != (self.pattern is not None):
            raise ValueError('pattern goes with reward = "regex", and reward = "regex" needs it')
        return self


_CHAIN_KEYS = ("min_operands", "max_operands")
_DATASET_KEYS = tuple(name for name in TaskConfig.model_fields if name not in ("kind", *_CHAIN_KEYS))
