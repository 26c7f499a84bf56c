"""The configuration of sampling: of the engine that samples, of rollouts, and of evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST, Count, Natural, Section, Timeout, Tokens
from foreroute.train.config.unused_keys import refuse_unused

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Divided by less, logits overflow; divided by more, all are alike."""


class VLLMConfig(Section):
    """Where vLLM runs, for `rollout.engine = "vllm"`."""

    mode: Literal["process", "server"] = "process"
    """A process that the trainer starts, or a running server."""
    python: str | None = None
    """process: interpreter of an environment with vLLM."""
    max_model_len: Tokens | None = None
    """process: tokens of the longest sequence; by default the model's limit."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """process: further arguments of `vllm.LLM`."""
    url: str | None = None
    """server: address, such as "http://127.0.0.1:8000"."""
    weights_folder: str | None = None
    """server: folder for new weights, at a path that both see."""
    timeout_s: Timeout = 600.0
    """Of loading, and of each request."""

    @model_validator(mode="after")
    def _server_known(self) -> VLLMConfig:
        if self.mode == "server" and (self.url is None or self.weights_folder is None):
            raise ValueError('mode = "server" needs url and weights_folder')
        of_the_other = {"process": ("url", "weights_folder"), "server": ("python", "max_model_len", "options")}
        refuse_unused(
            self, of_the_other[self.mode], f'with mode = "{self.mode}"; leave them out, or set the other mode'
        )
        return self


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """A copy of the policy in this process, or vLLM."""
    precision: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    """Of the engine; a vLLM server has its own."""
    vllm: VLLMConfig = VLLMConfig()
    prompts: Count = 32
    """Prompts per step."""
    group_size: Annotated[int, Field(ge=2, le=MOST)] = 8
    """Responses per prompt."""
    max_rounds: Annotated[int, Field(ge=1, le=100)] = 1
    """Dynamic sampling: most rounds; prompts whose responses all get one reward are replaced."""
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)] = 1.0
    """Divides the logits, in engine and trainer."""
    max_staleness: Annotated[int, Field(ge=0, le=100)] = 0
    """Sample so many weight versions ahead, beside the updates."""

    @model_validator(mode="after")
    def _can_be_kept(self) -> RolloutConfig:
        if self.prompts * self.group_size > MOST:
            raise ValueError(f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST} at most")
        return self

    @model_validator(mode="after")
    def _precision_of_engine(self) -> RolloutConfig:
        if self.engine != "vllm":
            refuse_unused(self, ["vllm"], f'with engine = "{self.engine}"; set engine = "vllm", or leave it out')
        elif self.vllm.mode == "server":
            refuse_unused(self, ["precision"], "of a vLLM server, which has its own; leave it out")
        if self.engine == "vllm" and self.vllm.mode == "process" and self.vllm.python is None:
            raise ValueError('engine = "vllm" needs vllm.python, the interpreter of an environment with vLLM')
        if self.engine == "vllm" and self.precision == "fp8":
            raise ValueError('precision = "fp8" is the embedded engine\'s; vLLM takes float32 or bfloat16')
        return self


class EvaluationConfig(Section):
    """Rewards on held-out problems. Changes nothing in the run."""

    every: Natural = 0
    """Steps between evaluations, from before step 0; 0: none."""
    prompts: Count = 32
    """Held-out problems, the same each time."""
    group_size: Count = 1
    """Responses to each."""
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] = 0.0
    """0: greedy."""
    data: str | None = None
    """dataset: JSONL file; its first prompts are used."""

    @model_validator(mode="after")
    def _takes_place(self) -> EvaluationConfig:
        if self.every == 0:
            refuse_unused(self, EvaluationConfig.model_fields, "with every = 0; set every, or leave the others out")
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"group_size = {self.group_size} responses to a prompt are all the same at temperature = 0; raise the "
                "temperature, or leave group_size out"
            )
        return self

    @model_validator(mode="after")
    def _can_be_had(self) -> EvaluationConfig:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} overflows; set 0, or {LEAST_TEMPERATURE} and more")
        if self.prompts * self.group_size > MOST:
            raise ValueError(f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST} at most")
        return self
