"""The configuration of sampling, and of the engine that samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.balance.config_file import Count, Section
from foreroute.train.config.idle import refuse_idle


class VLLMConfig(Section):
    """Where vLLM runs, for `rollout.engine = "vllm"`."""

    mode: Literal["process", "server"] = "process"
    """A worker process that the trainer starts and ends, or a server that is already running."""
    python: str | None = None
    """process: the interpreter of an environment with vLLM."""
    max_model_len: Count | None = None
    """process: tokens of the longest sequence; by default the most that the model takes."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """process: further arguments of `vllm.LLM`."""
    url: str | None = None
    """server: its address, such as "http://127.0.0.1:8000"."""
    weights_folder: str | None = None
    """server: where new weights are put for it, under a path that it sees too."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """For loading and for each request."""

    @model_validator(mode="after")
    def _server_known(self) -> VLLMConfig:
        if self.mode == "server" and (self.url is None or self.weights_folder is None):
            raise ValueError('mode = "server" needs url and weights_folder')
        of_the_other = {"process": ("url", "weights_folder"), "server": ("python", "max_model_len", "options")}
        refuse_idle(self, of_the_other[self.mode], f'with mode = "{self.mode}"; leave them out, or set the other mode')
        return self


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["embedded", "vllm"] = "embedded"
    """What samples: a copy of the policy in the trainer's process, or vLLM."""
    precision: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    """Of the engine's weights and arithmetic. A vLLM server has its own."""
    vllm: VLLMConfig = VLLMConfig()
    prompts: Count = 32
    """Prompts per step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt."""
    max_rounds: Count = 1
    """Dynamic sampling: prompts whose responses all get one reward are replaced by new ones, in at most so many rounds
    of sampling, the first included."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in the rollout and in the trainer."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Versions by which the weights that sample a step are older than those that train on it. Above 0 rollouts are
    sampled beside the updates of earlier steps."""

    @model_validator(mode="after")
    def _precision_of_engine(self) -> RolloutConfig:
        if self.engine != "vllm":
            refuse_idle(self, ["vllm"], f'with engine = "{self.engine}"; set engine = "vllm", or leave it out')
        elif self.vllm.mode == "server":
            refuse_idle(self, ["precision"], "of a vLLM server, which has its own; leave it out")
        if self.engine == "vllm" and self.vllm.mode == "process" and self.vllm.python is None:
            raise ValueError('engine = "vllm" needs vllm.python, the interpreter of an environment with vLLM')
        if self.engine == "vllm" and self.precision == "fp8":
            raise ValueError('precision = "fp8" is the embedded engine\'s; vLLM takes float32 or bfloat16')
        return self
