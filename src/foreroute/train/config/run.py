"""The configuration of a whole run: how it is watched, where it is executed, and what fits together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foreroute.files.config_file import (
    MOST_SECONDS,
    Count,
    Natural,
    Ranks,
    Section,
    Slots,
    Threads,
    Timeout,
    checked,
)
from foreroute.files.toml import read_toml
from foreroute.mismatch import Kind
from foreroute.plan.capabilities import FetchPath
from foreroute.train.config.learned import EvaluationConfig, ModelConfig, RolloutConfig, TaskConfig, WarmStartConfig
from foreroute.train.config.rl import RLConfig

MOST_NAME_BYTES = 200
"""File systems take 255, and the names of temporary files are longer."""
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")


class MeasureConfig(Section):
    """What is measured. Changes nothing in the run."""

    compare_every: Count = 1
    """Steps between measurements of the other side's mismatch (under R3: without replay)."""
    save_trace_every: Count = 20
    """Steps between saved rollouts."""


class CheckpointConfig(Section):
    """When the state is saved."""

    every: Count = 20
    """Steps between checkpoints."""


class AlarmsConfig(Section):
    """When a run is in danger, and what to do then."""

    action: Literal["warn", "stop"] = "warn"
    """Say so and go on, or end the run."""
    act_on: list[Kind] = Field(default=["collapse"])
    """The alarms that end it; the others only warn."""

    @model_validator(mode="after")
    def _can_act(self) -> AlarmsConfig:
        if self.action != "warn" and not self.act_on:
            raise ValueError(f'action = "{self.action}" with an empty act_on never acts; name alarms, or set "warn"')
        if self.action == "warn":
            self.refuse_unused(["act_on"], 'with action = "warn"; set "stop", or leave it out')
        return self


class LoggingConfig(Section):
    """Where else the numbers of metrics.jsonl go. May change on resume."""

    tensorboard: bool = False
    """Event files in the run's folder, under tensorboard/."""
    wandb: bool = False
    """Weights & Biases."""
    wandb_project: str = "foreroute"
    """The project there. A run keeps its identity when it is resumed."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline runs stay in the run's folder, for `wandb sync`."""

    @model_validator(mode="after")
    def _takes_place(self) -> LoggingConfig:
        if not self.wandb:
            self.refuse_unused(("wandb_project", "wandb_mode"), "with wandb = false; set it to true, or leave them out")
        return self


class ParallelConfig(Section):
    """Expert parallelism under torchrun. Changes nothing that a run learns."""

    expert: Ranks = 1
    """Ranks, one process each."""
    topology: str | None = None
    """[File](planner.md#the-topology-file) of ranks, links and prices."""
    ranks_per_node: Ranks | None = None
    """Ranks that share a node's memory; all by default."""
    redundant_slots: Slots = 2
    """Replicas on a rank, per layer; 0: every expert at home."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Most that the busiest rank of a balanced cell is above the mean."""
    slots: Literal["layer", "shared"] = "layer"
    """Slots of each layer, or one set for all."""
    home_moves: Natural | Literal["all"] = 0
    """Most experts of a layer that change their home before a step."""
    pay_off: bool | None = None
    """Drop replicas that cost more than they save; by default where priced."""
    traffic: bool | None = None
    """More replicas, against traffic between nodes; likewise."""
    paths: FetchPath = "host"
    """Replicas by the node's memory, or peer to peer."""
    shared_memory: str = "/dev/shm"
    """Folder in the node's memory for replicas."""
    prefetch: Natural = 1
    """Cells whose replicas are fetched ahead."""
    deadline_s: Annotated[float, Field(ge=0, le=MOST_SECONDS)] | None = None
    """A cell waits so long for replicas, then uses the homes."""
    checksums: bool = False
    """Verify replicas on arrival."""
    dense: Literal["replicated", "fsdp2"] = "replicated"
    """All but experts: whole on every rank, or sharded."""
    timeout_s: Timeout = 600.0
    """A rank that is silent so long is taken for dead."""

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.ranks_per_node is not None and self.expert % self.ranks_per_node:
            raise ValueError(
                f"expert = {self.expert} ranks do not fill nodes of ranks_per_node = {self.ranks_per_node}"
            )
        if self.dense == "fsdp2" and self.expert == 1:
            raise ValueError('dense = "fsdp2" spreads parameters over ranks; set expert above 1, or leave it out')
        if self.expert == 1:
            self.refuse_unused(
                ParallelConfig.model_fields, "with expert = 1, one process; set expert, or leave them out"
            )
        if self.topology is not None:
            self.refuse_unused(
                ("ranks_per_node", "redundant_slots"), "beside topology, which says them; leave them out"
            )
        elif self.pay_off or self.traffic:
            asked = "pay_off" if self.pay_off else "traffic"
            raise ValueError(f"{asked} = true goes by prices; name a topology file, or leave it out")
        if self.traffic and self.slots != "shared":
            raise ValueError('traffic = true refills all slots in every cell; set slots = "shared", or leave it out')
        if self.deadline_s is not None and self.deadline_s >= self.timeout_s:
            raise ValueError(f"deadline_s = {self.deadline_s} is not below timeout_s = {self.timeout_s}")
        return self


class TrainConfig(Section):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Names the run's folder: letters, digits, dots, dashes, underscores."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of initial weights, problems, sampling and order."""
    device: str = "auto"
    """`"cpu"`, `"cuda"`, `"cuda:N"`, or `"auto"`: CUDA if every process has a GPU."""
    threads: Threads = 1
    """Threads of torch. With 1, small models are fastest and runs repeat bit for bit."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    rl: RLConfig = RLConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    measure: MeasureConfig = MeasureConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    logging: LoggingConfig = LoggingConfig()
    parallel: ParallelConfig = ParallelConfig()

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.strip(".") or len(name.encode()) > MOST_NAME_BYTES:
            raise ValueError(
                f"{name[:20]!r}{'...' * (len(name) > 20)} cannot name a folder of its own; expected at most "
                f"{MOST_NAME_BYTES} bytes, and more than dots"
            )
        return name

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not DEVICE.fullmatch(device):
            raise ValueError(f'{device!r:.40} is no device; expected "auto", "cpu", "cuda" or "cuda:N"')
        return device

    @model_validator(mode="before")
    @classmethod
    def _trained_models_start_warm(cls, values: Any) -> Any:
        given = values if isinstance(values, dict) else {}
        model, warm_start = given.get("model"), given.get("warm_start", {})
        if isinstance(model, dict) and model.get("path") is not None and isinstance(warm_start, dict):
            return {**given, "warm_start": {"max_steps": 0, **warm_start}}
        return values

    @model_validator(mode="after")
    def _task_fits(self) -> TrainConfig:
        folder = self.model.tokenizer_folder
        if self.task.kind == "dataset" and folder is None:
            raise ValueError(
                'task.kind = "dataset" needs a tokenizer; set model.path, or model.tokenizer for a new model'
            )
        if self.task.kind == "chain" and folder is not None:
            raise ValueError(
                f'task.kind = "chain" has 16 tokens of its own, and no use for the tokenizer in {folder}; set '
                'task.kind = "dataset", or leave model.path and model.tokenizer out'
            )
        if self.evaluation.every and (self.evaluation.data is None) == (self.task.kind == "dataset"):
            raise ValueError('evaluation.data goes with task.kind = "dataset", which needs it; chains make their own')
        if self.rollout.engine == "vllm" and self.rollout.truncates and self.evaluation.temperature:
            raise ValueError(
                "evaluation.temperature is not 0, and vLLM with sampling masks, for rollout.top_p, top_k or min_p, "
                "would list the whole vocabulary for each token; set it to 0"
            )
        if self.rl.routing == "R3+weights" and self.rollout.engine != "embedded":
            raise ValueError('rl.routing = "R3+weights" needs rollout.engine = "embedded", which records gate weights')
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> TrainConfig:
        sequences = self.rollout.prompts * self.rollout.group_size
        if self.rl.mini_steps > sequences:
            raise ValueError(f"rl.mini_steps = {self.rl.mini_steps} exceeds the {sequences} sequences of a rollout")
        longest = self.task.longest_input
        if self.rl.micro_step_tokens < longest:
            raise ValueError(
                f"rl.micro_step_tokens = {self.rl.micro_step_tokens} cannot hold a sequence of up to {longest} tokens"
            )
        return self

    @model_validator(mode="after")
    def _runs_on_these_ranks(self) -> TrainConfig:
        wanted = {'model.dtype = "bfloat16"': self.model.dtype != "float32", "model.lora": self.model.lora.rank > 0}
        wanted["rollout.max_staleness"] = self.rollout.max_staleness > 0
        asked = [key for key, is_asked in wanted.items() if is_asked]
        if self.parallel.expert > 1 and asked:
            raise ValueError(f"{asked[0]} trains in one process; set parallel.expert = 1, or leave it out")
        num_ranks = self.parallel.expert
        if num_ranks > 1 and ":" in self.device:
            raise ValueError(
                f'device = "{self.device}" is one device, and parallel.expert = {num_ranks} processes need one each; '
                'set device = "cuda"'
            )
        if self.rollout.prompts % num_ranks:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} cannot be dealt to parallel.expert = {num_ranks} evenly"
            )
        if self.evaluation.every and self.evaluation.prompts % num_ranks:
            raise ValueError(
                f"evaluation.prompts = {self.evaluation.prompts} cannot be dealt to parallel.expert = {num_ranks} "
                "evenly"
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
