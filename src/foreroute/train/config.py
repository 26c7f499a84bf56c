"""The configuration of a run, as a TOML file says it: every table, every key, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from foreroute.costs.memory import MOST_BUDGET
from foreroute.files.config_file import (
    MOST_COUNTED,
    Count,
    Natural,
    NotNegative,
    Positive,
    Ranks,
    Section,
    Slots,
    Threads,
    Timeout,
    Tokens,
    checked,
)
from foreroute.files.toml import read_toml
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.options import PRICED, PlanOptions

Routing = Literal["none", "R2", "R3"]
Method = Literal["dapo", "gspo"]
Watching = Literal["off", "warn", "drop", "stop"]

METHODS: dict[str, dict[str, float]] = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
}
"""The clip bounds of each method where the configuration gives none. docs/train.md has the papers."""
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 1e3
"""Logits that are divided by less overflow; divided by more, all are alike."""


class ModelConfig(Section):
    """A Hugging Face model from a folder, or a new one."""

    path: str | None = None
    """Model folder: config.json and safetensors."""
    tokenizer: str | None = None
    """Tokenizer folder, by default the model's."""
    family: str | None = None
    """New model: type in transformers, by default "qwen3_moe"."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """transformers' backend, where it has several."""
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """New model: configuration, without the vocabulary."""
    gradient_checkpointing: bool = False
    """Saves memory, changes no bit."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and (self.family is not None or self.sizes):
            raise ValueError("path names a model that has its family and sizes; leave family and sizes out")
        if "vocab_size" in self.sizes:
            raise ValueError("sizes.vocab_size comes from the task; leave it out")
        return self

    @property
    def source(self) -> str:
        """The folder, or the family of a new model."""
        return self.path or self.family or "qwen3_moe"

    @property
    def tokenizer_folder(self) -> str | None:
        """Folder of the tokenizer, if there is one."""
        return self.tokenizer or self.path


class WarmStartConfig(Section):
    """Supervised training on chains before RL; none with task.data."""

    checkpoint: str | None = None
    """Start from this checkpoint; excludes the other keys."""
    max_steps: Natural = 800
    """Most steps, with cosine decay; 0: none."""
    batch_size: Count = 128
    """Right answers per step."""
    learning_rate: Positive = 3e-3
    """AdamW's learning rate at first."""
    stop_at_loss: Positive = 0.3
    """Stop below this mean loss, nats per answer token."""
    aux_loss: NotNegative = 0.01
    """Weight of the load-balancing loss."""

    @model_validator(mode="after")
    def _takes_place(self) -> WarmStartConfig:
        if self.checkpoint is not None:
            self.refuse_unused(LEARNING, "beside a checkpoint; leave it out")
        elif self.max_steps == 0:  # which itself is how a warm start is left out
            self.refuse_unused(LEARNING[1:], "with max_steps = 0; set max_steps")
        return self


LEARNING = ("max_steps", "batch_size", "learning_rate", "stop_at_loss", "aux_loss")
"""Keys of a warm start that teaches."""


class TaskConfig(Section):
    """Chains of digit arithmetic, or your prompts and reward."""

    min_operands: Count = 8
    """Fewest digits of a chain."""
    max_operands: Count = 8
    """Most digits of a chain."""
    data: str | None = None
    """JSONL file of prompts instead of chains."""
    reward: str | None = None
    """Reward of prompts in `data`: "file.py:function"."""
    max_prompt_tokens: Tokens = 512
    """Longest prompt in `data`."""
    max_response_tokens: Tokens = 512
    """Longest response to prompts in `data`; longer ones are cut and trained on."""

    @property
    def longest_input(self) -> int:
        """Tokens of the longest sequence that is put into the model; the last token of a sequence is not."""
        if self.data is not None:
            return self.max_prompt_tokens + self.max_response_tokens - 1
        return 3 * self.max_operands  # operands, operators and "=", then one result each

    @model_validator(mode="after")
    def _check_source(self) -> TaskConfig:
        if self.min_operands > self.max_operands:
            raise ValueError(f"min_operands = {self.min_operands} exceeds max_operands = {self.max_operands}")
        if (self.data is None) != (self.reward is None):
            raise ValueError("data, a JSONL file, and reward go together; set both, or neither for chains")
        if self.data is None:
            self.refuse_unused(("max_prompt_tokens", "max_response_tokens"), "without data; set data and reward")
        else:
            self.refuse_unused(("min_operands", "max_operands"), "beside data; leave them out")
        if self.reward is not None and not self.reward.partition(".py:")[2]:
            raise ValueError(f'reward = "{self.reward}" is no function; write "file.py:function"')
        return self


class ServerConfig(Section):
    """A vLLM that the run starts, or [your server](capture.md#a-server-of-yours)."""

    python: str | None = None
    """vLLM's Python, to start it."""
    max_model_len: Tokens | None = None
    """Longest sequence of a started server, by default the model's."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of `vllm serve` where python is set: block_size = 32."""
    url: str | None = None
    """Address of your server."""
    weights_folder: str | None = None
    """Folder for weights where url is set, under one path for both."""
    timeout_s: Timeout = 600.0
    """Longest start or request."""

    @model_validator(mode="after")
    def _one_place(self) -> ServerConfig:
        if (self.url is None) != (self.weights_folder is None):
            raise ValueError("url and weights_folder go together: weights reach a server of yours through a folder")
        if self.url is not None:
            self.refuse_unused(("python", "max_model_len", "options"), "beside url; leave them out, or leave url out")
        return self


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """A copy in this process, or a server."""
    precision: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    """Number format of the engine."""
    server: ServerConfig = ServerConfig()
    prompts: Count = 32
    """Prompts per step."""
    group_size: Annotated[int, Field(ge=2, le=MOST_COUNTED)] = 8
    """Responses per prompt."""
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)] = 1.0
    """Divides logits, in engine and trainer."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the fewest tokens with this probability."""
    top_k: Natural = 0
    """Keep the most probable tokens; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Least part of the highest probability."""

    @property
    def truncates(self) -> bool:
        """Say whether tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _can_be_sampled(self) -> RolloutConfig:
        if self.prompts * self.group_size > MOST_COUNTED:
            raise ValueError(
                f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST_COUNTED} at most"
            )
        if self.engine == "embedded":
            self.refuse_unused(["server"], 'with engine = "embedded"; set engine = "vllm" or "sglang", or leave it out')
        elif self.server.url is not None:
            self.refuse_unused(["precision"], "with server.url: it is that of the server; leave it out")
        elif self.engine == "sglang":
            raise ValueError('engine = "sglang" needs server.url, the address of a server of yours')
        elif self.server.python is None:
            raise ValueError(
                'engine = "vllm" needs server.python, the interpreter of an environment with vLLM, or server.url'
            )
        elif self.precision == "fp8":
            raise ValueError('precision = "fp8" is the embedded engine\'s; vLLM takes float32 or bfloat16')
        return self


class CorrectionConfig(Section):
    """Weights for tokens by the ratio of trainer to engine."""

    method: Literal["none", "tis"] = "none"
    """Truncated importance sampling, per token."""
    high: Positive = 2.0
    """Highest weight of tis."""

    @model_validator(mode="after")
    def _bounds_something(self) -> CorrectionConfig:
        if self.method == "none":
            self.refuse_unused(["high"], 'without a method; set method = "tis"')
        return self


class RLConfig(Section):
    """Old-log-prob pass and update."""

    routing: Routing = "R3"
    """The trainer's [experts](#objectives)."""
    router: Literal["trained", "frozen"] = "trained"
    """Routers in RL, trained or frozen."""
    steps: Count = 80
    """Rollouts with updates; on resume, at least those recorded."""
    mini_steps: Count = 1
    """Optimizer steps per rollout."""
    micro_step_tokens: Tokens = 4096
    """Tokens of one forward pass, with padding."""
    learning_rate: Positive = 6e-4
    """AdamW's learning rate after warm-up."""
    warmup_steps: Natural = 5
    """Steps of warm-up."""
    max_grad_norm: Positive = 1.0
    """Larger gradients are scaled down to it."""
    method: Method = "dapo"
    """The [loss](#objectives), with its clip bounds."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Clips ratios below 1 - clip_low; 1: none."""
    clip_high: Positive = 0.28
    """Clips ratios above 1 + clip_high."""
    correction: CorrectionConfig = CorrectionConfig()
    sentinel: Watching = "warn"
    """Under R3, at rows that [look wrong](diagnose.md#the-sentinel): train on what is before them, or stop."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_method_says(cls, values: Any) -> Any:
        # before the fields are read, so that a bound that is given stays
        method = values.get("method", "dapo") if isinstance(values, dict) else None
        return {**METHODS[method], **values} if isinstance(method, str) and method in METHODS else values

    @model_validator(mode="after")
    def _watches_what_is_replayed(self) -> RLConfig:
        if self.routing != "R3" and self.sentinel != "off":
            self.refuse_unused(["sentinel"], 'without routes of the rollout; set routing = "R3", or leave it out')
        return self


class MeasureConfig(Section):
    """Changes nothing in the run."""

    compare_every: Count = 1
    """Steps between measurements without replay, or under "none" and "R2" with it."""
    save_trace_every: Count = 20
    """Steps between saved rollouts."""


class CheckpointConfig(Section):
    """Times at which the state is saved."""

    every: Count = 20
    """Steps between checkpoints."""
    keep: Count = 2
    """Last checkpoints that stay."""


class ParallelConfig(Section):
    """Expert parallelism under torchrun ([versions](where.md#versions)). Changes nothing that a run learns."""

    expert: Ranks = 1
    """Ranks, one process each."""
    topology: str | None = None
    """[File](planner.md#the-topology-file) of links and prices."""
    ranks_per_node: Ranks | None = None
    """Ranks of a node; all by default."""
    redundant_slots: Slots = 2
    """Replicas per rank and layer; 0: none."""
    paths: FetchPath = "direct"
    """Replicas peer to peer, or through node memory."""
    shared_memory: str = "/dev/shm"
    """Folder in node memory."""
    prefetch: Natural = 1
    """Cells fetched ahead."""
    memory_budget: Annotated[int, Field(ge=0, le=MOST_BUDGET)] = 0
    """Bytes of a rank by [forecast](sizing.md#a-micro-step); an update above takes more micro-steps. 0: any."""
    timeout_s: Timeout = 600.0
    """Longest silence of a live rank."""
    plan: Annotated[PlanOptions, BeforeValidator(PlanOptions.from_table)] = PlanOptions()
    """The planner's [options](planner.md#what-the-planner-decides), `home_moves = 4` or `packing = "routes"`."""

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.ranks_per_node is not None and self.expert % self.ranks_per_node:
            raise ValueError(
                f"expert = {self.expert} ranks do not fill nodes of ranks_per_node = {self.ranks_per_node}"
            )
        if self.expert == 1:
            self.refuse_unused(
                ParallelConfig.model_fields, "with expert = 1, one process; set expert, or leave them out"
            )
        if self.topology is not None:
            self.refuse_unused(
                ("ranks_per_node", "redundant_slots"), "beside topology, which says them; leave them out"
            )
        elif asked := [name for name in PRICED if getattr(self.plan, name)]:
            raise ValueError(f"plan.{asked[0]} = true goes by prices; name a topology file, or leave it out")
        return self


class TrainConfig(Section):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]*[\w-][\w.-]*$", max_length=50)]
    """The run's folder: letters, digits, dots, dashes, underscores, not dots alone."""
    seed: Annotated[int, Field(ge=0)] = 0
    """For weights, problems, sampling and order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto: CUDA, if every process has one."""
    threads: Threads = 1
    """Torch threads; with 1, small models are fastest and runs repeat bit for bit."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    rl: RLConfig = RLConfig()
    measure: MeasureConfig = MeasureConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _task_fits(self) -> TrainConfig:
        folder = self.model.tokenizer_folder
        if self.task.data is not None and folder is None:
            raise ValueError("task.data needs a tokenizer; set model.path, or model.tokenizer for a new model")
        if self.task.data is None and folder is not None:
            raise ValueError(
                f"chains have 16 tokens of their own, and no use for the tokenizer in {folder}; set task.data and "
                "task.reward, or leave model.path and model.tokenizer out"
            )
        if self.task.data is not None:
            self.warm_start.refuse_unused(LEARNING, "with task.data, which has no right answers; leave it out")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainConfig:
        sequences = self.rollout.prompts * self.rollout.group_size
        if self.rl.mini_steps > sequences:  # a mini-batch would be empty
            raise ValueError(f"rl.mini_steps = {self.rl.mini_steps} exceeds the {sequences} sequences of a rollout")
        longest = self.task.longest_input
        if self.rl.micro_step_tokens < longest:
            raise ValueError(
                f"rl.micro_step_tokens = {self.rl.micro_step_tokens} cannot hold a sequence of up to {longest} tokens"
            )
        return self

    @model_validator(mode="after")
    def _runs_on_these_ranks(self) -> TrainConfig:
        num_ranks = self.parallel.expert
        if self.rollout.prompts % num_ranks:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} cannot be dealt to parallel.expert = {num_ranks} evenly"
            )
        packs = self.parallel.plan.packing == "routes"
        asked = 'plan.packing = "routes"' if packs else "memory_budget"
        if self.rl.routing == "none" and (packs or self.parallel.memory_budget):
            raise ValueError(
                f"parallel.{asked} goes by replayed routes, and "
                'rl.routing = "none" replays none; set rl.routing = "R3" or "R2", or leave it out'
            )
        # every rank samples its own block of prompts, by an engine of its own
        if num_ranks > 1 and self.rollout.engine != "embedded":
            raise ValueError(f'parallel.expert = {num_ranks} needs rollout.engine = "embedded", which every rank has')
        return self


def load_config(path: Path) -> TrainConfig:
    """Read a TOML file; `ConfigError` names every unknown key, with the nearest known one, wrong type and conflict."""
    return parse_config(read_toml(path), source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> TrainConfig:
    """Check values that came from `source`. Raises as `load_config`."""
    return checked(TrainConfig, values, source=source)
