"""The configuration of what is trained, on what: the model, its warm start, the task, rollouts and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST, Count, Natural, NotNegative, Positive, Section, Timeout, Tokens

BUILT_IN = ("exact_match", "regex", "arithmetic", "countdown")
"""Verifiers that a reward can name."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Divided by less, logits overflow; divided by more, all are alike."""


class LoRAConfig(Section):
    """Low-rank adapters (peft) that RL trains in place of the weights; `rl.router` still decides about routers."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of A and B in W + alpha / rank · B A; 0: no adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters."""
    targets: list[str] = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1)
    """Names of linear layers, in every block."""

    @model_validator(mode="after")
    def _has_rank(self) -> LoRAConfig:
        if not self.rank:
            self.refuse_unused(LoRAConfig.model_fields, "without adapters; set rank, such as 16")
        return self


class ModelConfig(Section):
    """The policy: a Hugging Face model from a folder, or a new one from sizes and seed."""

    path: str | None = None
    """Folder of an MoE model: config.json and safetensors."""
    tokenizer: str | None = None
    """Folder of a tokenizer; the model's own by default. A new model gets its vocabulary."""
    family: str | None = None
    """Without path: model type in transformers, "qwen3_moe" by default."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How transformers computes experts, if the family has a choice."""
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Without path: fields of the family's configuration, without the vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic. The optimizer's weights and gradients are float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward. Changes no bit."""
    lora: LoRAConfig = LoRAConfig()

    @model_validator(mode="before")
    @classmethod
    def _usual_family(cls, values: Any) -> Any:
        new = isinstance(values, dict) and values.get("path") is None and values.get("family") is None
        return {**values, "family": "qwen3_moe"} if new else values

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and (self.family is not None or self.sizes):
            raise ValueError("path names a model that has its family and sizes; leave family and sizes out")
        if "vocab_size" in self.sizes:
            raise ValueError("sizes.vocab_size comes from the task; leave it out")
        return self

    @property
    def tokenizer_folder(self) -> str | None:
        """Where the tokenizer is, if there is one."""
        return self.tokenizer or self.path


class WarmStartConfig(Section):
    """Supervised training before RL."""

    checkpoint: str | None = None
    """A checkpoint to start from, instead of the other keys."""
    max_steps: Natural = 800
    """Most steps; the learning rate falls along a cosine. 0, the default with model.path, skips the warm start."""
    batch_size: Count = 128
    """Right answers per step."""
    learning_rate: Positive = 3e-3
    """Of AdamW, at first."""
    stop_at_loss: Positive = 0.3
    """Stop when the loss's moving average, nats per answer token, is below this."""
    aux_loss: NotNegative = 0.01
    """Weight of the load-balancing loss; RL has none."""

    @model_validator(mode="after")
    def _takes_place(self) -> WarmStartConfig:
        others = [name for name in WarmStartConfig.model_fields if name not in ("checkpoint", "max_steps")]
        if self.checkpoint is not None:
            # 0 is what a model from a path has by default
            unused = [*others, "max_steps"] if self.max_steps else others
            self.refuse_unused(unused, "beside a checkpoint; leave it out")
        elif self.max_steps == 0:
            self.refuse_unused(others, "with max_steps = 0, the default for a model from a path; set max_steps")
        return self


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
        self.refuse_unused(other, f'with kind = "{self.kind}"; leave out what is of the other kind')
        if self.kind == "dataset" and (self.data is None or self.reward is None):
            raise ValueError('kind = "dataset" needs data, a JSONL file, and reward')
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
            self.refuse_unused(["max_tool_tokens"], "without an environment; leave it out")
            if self.reward in BUILT_IN and self.reward != "regex":
                self.refuse_unused(["function_timeout_s"], "without a function of your own or a pattern; leave it out")
        if (self.reward == "regex") != (self.pattern is not None):
            raise ValueError('pattern goes with reward = "regex", and reward = "regex" needs it')
        return self


_CHAIN_KEYS = ("min_operands", "max_operands")
_DATASET_KEYS = tuple(name for name in TaskConfig.model_fields if name not in ("kind", *_CHAIN_KEYS))


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
        self.refuse_unused(of_the_other[self.mode], f'with mode = "{self.mode}"; leave them out, or set the other mode')
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
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the fewest tokens with this much of the probability; the trainer uses the same ones."""
    top_k: Natural = 0
    """Keep so many of the most probable tokens; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens of at least this part of the highest probability."""
    max_staleness: Annotated[int, Field(ge=0, le=100)] = 0
    """Sample so many weight versions ahead, beside the updates."""

    @property
    def truncation(self) -> dict[str, Any]:
        """What `Sampling` takes of it: which tokens are left out."""
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}

    @property
    def truncates(self) -> bool:
        """Whether tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _can_be_kept(self) -> RolloutConfig:
        if self.prompts * self.group_size > MOST:
            raise ValueError(f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST} at most")
        if self.engine != "vllm":
            self.refuse_unused(["vllm"], f'with engine = "{self.engine}"; set engine = "vllm", or leave it out')
        elif self.vllm.mode == "server":
            self.refuse_unused(["precision"], "of a vLLM server, which has its own; leave it out")
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
            self.refuse_unused(EvaluationConfig.model_fields, "with every = 0; set every, or leave the others out")
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"group_size = {self.group_size} responses to a prompt are all the same at temperature = 0; raise the "
                "temperature, or leave group_size out"
            )
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} overflows; set 0, or {LEAST_TEMPERATURE} and more")
        if self.prompts * self.group_size > MOST:
            raise ValueError(f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST} at most")
        return self
