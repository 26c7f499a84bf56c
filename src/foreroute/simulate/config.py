"""The configuration of a simulation: a TOML file, every key with its default and what it means.

    [cluster]
    gpus = 64
    expert_parallel = 16

    [hardware]
    preset = "h100"

    [model]
    preset = "qwen3-30b-a3b"

    [workload]
    tokens_per_rank = 8192

`[hardware]`, `[links]`, `[model]` and `[costs]` are those of the planner's topology file. A file is checked whole:
every key, and its size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from foreroute.costs.cluster_file import Cluster, parse_cluster
from foreroute.errors import ConfigError
from foreroute.files.config_file import MOST_SECONDS, MOST_TOKENS, Count, Ranks, Section, Slots, checked
from foreroute.files.toml import read_toml
from foreroute.simulate.methods import DEFAULT_METHODS, METHODS
from foreroute.simulate.steps import require_drawable
from foreroute.simulate.workload import WORKLOADS

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
DrawnTokens = Annotated[int, Field(ge=512, le=MOST_TOKENS)]
"""Tokens of four or five sequences, none of which may be shorter than the shortest that is drawn."""
Skew = Annotated[float, Field(ge=1e-3, le=1e3)]
DRAWING = ("preset", "tokens_per_rank", "micro_steps", "layers", "groups", "skew", "seed")
"""Keys of a workload that is drawn."""
PASSED_ON = ("hardware", "links", "model", "costs")
"""Tables that are those of a topology file."""


def load_config(path: Path) -> SimulateConfig:
    """Read a TOML file.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type and conflict; or what would take
            more memory than a simulation may.
        TopologyError: when ranks do not fill nodes.
    """
    return parse_config(read_toml(path), source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> SimulateConfig:
    """Check values that came from `source`.

    Raises:
        ConfigError, TopologyError: as `load_config`.
    """
    config = checked(SimulateConfig, values, source=source)
    cluster = config.described(source)
    experts, ranks = cluster.costs.model.num_experts, cluster.topology.num_ranks
    # told here, by the name of the key, and not by the planner
    if experts % ranks:
        raise ConfigError(
            f"{source}: {experts} experts do not divide over expert_parallel = {ranks} ranks; use a number of "
            "expert-parallel ranks that divides the number of experts"
        )
    if config.workload.are_drawn:
        require_drawable(config, cluster.topology, cluster.costs.model, source=source)
    return config


class ClusterConfig(Section):
    """Division of the GPUs."""

    gpus: Count
    """All GPUs; a multiple of `expert_parallel`. Those of a node are `ranks_per_node` of [hardware]."""
    expert_parallel: Ranks
    """GPUs that share a layer's experts."""
    redundant_slots: Slots = 2
    """Per GPU and layer, unless the method has its own."""

    @model_validator(mode="after")
    def _groups_fill_the_cluster(self) -> ClusterConfig:
        if self.gpus % self.expert_parallel:
            raise ValueError(
                f"{self.gpus} GPUs do not fill groups of {self.expert_parallel}, expert_parallel; use a multiple"
            )
        return self

    @property
    def groups(self) -> int:
        """D, expert-parallel groups, each with all layers."""
        return self.gpus // self.expert_parallel


class WorkloadConfig(Section):
    """Drawn tokens, or yours."""

    preset: str = "R8"
    """[Unevenness](#what-is-not-modelled): R8, G8 to G64, E256."""
    counts: str | None = None
    """[Counts file](formats.md#other-files) instead of draws, for all groups."""
    traces: tuple[str, ...] = ()
    """Traces of one step, instead of draws, for all groups, packed as by `foreroute plan`."""
    previous_counts: str | None = None
    """Counts of the step before; needs counts."""
    tokens_per_rank: DrawnTokens | None = None
    """Per GPU and micro-step, within 10 %; by default the preset's. For traces the most, by default 16,384."""
    micro_steps: Count = 32
    """Micro-batches per rank."""
    layers: Count | None = 4
    """Drawn layers, repeated for all."""
    groups: Count | None = 8
    """Most drawn expert-parallel groups, repeated for all."""
    skew: Skew = 1.0
    """Above 1: less even."""
    seed: Annotated[int, Field(ge=0)] = 0
    """For drawing."""

    @field_validator("preset")
    @classmethod
    def _known(cls, preset: str) -> str:
        if preset not in WORKLOADS:
            raise ValueError(f"no workload is called {preset!r}; known are {', '.join(WORKLOADS)}")
        return preset

    @model_validator(mode="after")
    def _one_origin(self) -> WorkloadConfig:
        drawing = {name for name in DRAWING if getattr(self, name) != type(self).model_fields[name].default}
        # of traces it is the budget of packing
        drawing -= {"tokens_per_rank"} if self.traces else set()
        if self.are_drawn:
            if self.previous_counts is not None:
                raise ValueError("previous_counts go with counts; drawn steps have a step before of their own")
        elif drawing:
            names = ", ".join(sorted(drawing))
            raise ValueError(f"counts come from a file, and {names} would draw them; give one of the two")
        elif self.counts is not None and self.traces:
            raise ValueError("counts and traces are two workloads; give one of the two")
        return self

    @property
    def are_drawn(self) -> bool:
        """Say whether counts come from no file."""
        return self.counts is None and not self.traces


class ExecutionConfig(Section):
    """By default as the Hugging Face executor does."""

    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of computing that hides all-to-alls."""
    planning_s: Seconds | None = None
    """Planning per step of any method; measured by default."""
    plan_lead_s: Seconds = 0.0
    """From rollout to recompute."""
    rollout_s: Seconds = 0.0
    """Added to whole steps."""


class SimulateConfig(Section):
    """A simulation. `load_config` reads one from a file."""

    cluster: ClusterConfig
    workload: WorkloadConfig = WorkloadConfig()
    methods: tuple[str, ...] = DEFAULT_METHODS
    """In this order; `static` is always among them."""
    execution: ExecutionConfig = ExecutionConfig()
    hardware: dict[str, Any] = Field(default_factory=lambda: {"preset": "h100"})
    """Below."""
    links: dict[str, Any] = Field(default_factory=dict)
    """Below."""
    model: dict[str, Any] = Field(default_factory=lambda: {"preset": "qwen3-30b-a3b"})
    """Below."""
    costs: dict[str, Any] = Field(default_factory=dict)
    """Below."""

    @field_validator("methods", mode="before")
    @classmethod
    def _known_methods(cls, methods: Any) -> Any:
        # anything else is told by its type, by pydantic
        if isinstance(methods, list | tuple) and all(isinstance(name, str) for name in methods):
            if unknown := [name for name in methods if name not in METHODS]:
                known = ", ".join(METHODS)
                raise ValueError(f"there is no method called {', '.join(unknown)}; expected some of {known}")
            # all figures are over static
            return tuple(dict.fromkeys(["static", *methods]))
        return methods

    @field_validator("workload", mode="before")
    @classmethod
    def _lists(cls, table: Any) -> Any:
        # TOML has no tuples, and sections are checked strictly
        if isinstance(table, dict):
            return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        return table

    def described(self, source: str = "the configuration") -> Cluster:
        """Topology of one expert-parallel group, and the cost model.

        Raises:
            ConfigError, TopologyError: for unknown keys and presets, and ranks that do not fill nodes.
        """
        tables = {name: dict(getattr(self, name)) for name in PASSED_ON}
        cluster = self.cluster
        tables["topology"] = {"num_ranks": cluster.expert_parallel, "redundant_slots": cluster.redundant_slots}
        return parse_cluster(tables, source=source, num_gpus=cluster.gpus)
