"""The configuration of a training run: every key, its default, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foreroute.balance.config_file import Count, Section, checked, read_toml
from foreroute.train.rl_config import RLConfig


class ModelConfig(Section):
    """The policy, made from a configuration and the seed."""

    family: str = "qwen3_moe"
    """Model type of transformers."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of the family's configuration; the vocabulary comes from the task."""

    @model_validator(mode="after")
    def _vocabulary_of_the_task(self) -> ModelConfig:
        if "vocab_size" in self.sizes:
            raise ValueError("sizes.vocab_size comes from the task; leave it out")
        return self


class TaskConfig(Section):
    """Chains of digit arithmetic with a verifiable answer."""

    min_operands: Count = 8
    max_operands: Count = 8

    @model_validator(mode="after")
    def _in_order(self) -> TaskConfig:
        if self.min_operands > self.max_operands:
            raise ValueError(f"min_operands = {self.min_operands} exceeds max_operands = {self.max_operands}")
        return self


class WarmStartConfig(Section):
    """Supervised training before RL, until the model half knows the task."""

    checkpoint: str | None = None
    """A checkpoint to start from instead; then nothing else here is used."""
    max_steps: Count = 800
    batch_size: Count = 128
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    stop_at_loss: Annotated[float, Field(gt=0)] = 0.3
    """Training stops when the moving average of the loss, in nats per answer token, falls below this."""
    aux_loss: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balancing loss. RL uses none."""


class VLLMConfig(Section):
    """Where vLLM runs, for `rollout.engine = "vllm"`."""

    mode: Literal["process", "server"] = "process"
    """A worker process that the trainer starts and ends, or a server that is already running."""
    python: str = ".venv-vllm/bin/python"
    """process: the interpreter of an environment with vLLM; `make vllm-env` makes this one."""
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
        return self


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["embedded", "vllm"] = "embedded"
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

    @model_validator(mode="after")
    def _precision_of_engine(self) -> RolloutConfig:
        if self.engine == "vllm" and self.precision == "fp8":
            raise ValueError('precision = "fp8" is the embedded engine\'s; vLLM takes float32 or bfloat16')
        return self


class MeasureConfig(Section):
    """What is measured beside training. Nothing here changes the run."""

    compare_every: Count = 1
    """Steps between measurements of the mismatch that the run does not train with (without replay under R3)."""
    save_trace_every: Count = 20
    """Steps between saved rollout traces."""


class CheckpointConfig(Section):
    """When the state is saved."""

    every: Count = 20
    """Steps between checkpoints."""


class ParallelConfig(Section):
    """Expert parallelism: one process for each rank, started by torchrun. Nothing here changes what a run learns."""

    expert: Count = 1
    """Ranks that the experts are spread over, and the prompts dealt to; the number of processes."""
    ranks_per_node: Count | None = None
    """Ranks that share a node's memory; all of them by default."""
    redundant_slots: Annotated[int, Field(ge=0)] = 2
    """Replicas that a rank may serve in each layer; 0 leaves every expert at its home."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Of the planner: a cell is balanced when its busiest rank has at most this share more than the mean."""
    slots: Literal["layer", "shared"] = "layer"
    """Redundant slots for each layer, which keep what they hold, or one set for all layers."""
    paths: Literal["auto", "host", "direct"] = "auto"
    """How replicas travel: through the node's memory, peer to peer, or by whichever is expected to end sooner."""
    shared_memory: str = "/dev/shm"
    """Folder in the memory of a node, through which replicas travel unless paths = "direct"."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Cells ahead of the one that runs whose replicas are fetched."""
    deadline_s: Annotated[float, Field(ge=0)] | None = None
    """A cell waits this long for its replicas; then its tokens go to the homes."""
    checksums: bool = False
    """Verify what arrives."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A rank that does not answer for so long in the middle of a stage is taken for dead."""

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.ranks_per_node is not None and self.expert % self.ranks_per_node:
            raise ValueError(
                f"expert = {self.expert} ranks do not fill nodes of ranks_per_node = {self.ranks_per_node}"
            )
        if self.deadline_s is not None and self.deadline_s >= self.timeout_s:
            raise ValueError(f"deadline_s = {self.deadline_s} is not below timeout_s = {self.timeout_s}")
        return self


class TrainConfig(Section):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Letters, digits, dots, dashes and underscores: it names the run's folder."""
    seed: Annotated[int, Field(ge=0)] = 0
    threads: Count = 1
    """Threads of torch. Small models are fastest, and runs repeat bit for bit, with one."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    rl: RLConfig = RLConfig()
    measure: MeasureConfig = MeasureConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _enough_sequences(self) -> TrainConfig:
        sequences = self.rollout.prompts * self.rollout.group_size
        if self.rl.mini_steps > sequences:
            raise ValueError(f"rl.mini_steps = {self.rl.mini_steps} exceeds the {sequences} sequences of a rollout")
        longest = 3 * self.task.max_operands  # operands, operators and "=", then one result each; the end is no input
        if self.rl.micro_step_tokens < longest:
            raise ValueError(
                f"rl.micro_step_tokens = {self.rl.micro_step_tokens} cannot hold a sequence of up to {longest} tokens"
            )
        return self

    @model_validator(mode="after")
    def _engine_records_weights(self) -> TrainConfig:
        if self.rl.routing == "R3+weights" and self.rollout.engine != "embedded":
            raise ValueError('rl.routing = "R3+weights" needs rollout.engine = "embedded", which records gate weights')
        return self

    @model_validator(mode="after")
    def _can_be_spread(self) -> TrainConfig:
        num_ranks = self.parallel.expert
        if self.rollout.prompts % num_ranks:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} cannot be dealt to parallel.expert = {num_ranks} evenly"
            )
        if num_ranks > 1 and self.rollout.engine != "embedded":
            raise ValueError(f'parallel.expert = {num_ranks} needs rollout.engine = "embedded", which every rank has')
        return self


def load_config(path: Path) -> TrainConfig:
    """Read a TOML file.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type and conflict.
    """
    return parse_config(read_toml(path), source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> TrainConfig:
    """Check values that came from `source`.

    Raises:
        ConfigError: as `load_config`.
    """
    return checked(TrainConfig, values, source=source)
