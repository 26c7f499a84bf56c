"""The configuration of the processes that a run is spread over."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST_SECONDS, Natural, Ranks, Section, Slots, Timeout
from foreroute.train.config.idle import refuse_idle


class ParallelConfig(Section):
    """Expert parallelism: one process for each rank, started by torchrun. Nothing here changes what a run learns."""

    expert: Ranks = 1
    """Ranks that the experts are spread over, and the prompts dealt to; the number of processes."""
    ranks_per_node: Ranks | None = None
    """Ranks that share a node's memory; all of them by default."""
    redundant_slots: Slots = 2
    """Replicas that a rank may serve in each layer; 0 leaves every expert at its home."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Of the planner: a cell is balanced when its busiest rank has at most this share more than the mean."""
    slots: Literal["layer", "shared"] = "layer"
    """Redundant slots for each layer, which keep what they hold, or one set for all layers."""
    paths: Literal["auto", "host", "direct"] = "auto"
    """How replicas travel: through the node's memory, peer to peer, or by whichever is expected to end sooner."""
    shared_memory: str = "/dev/shm"
    """Folder in the memory of a node, through which replicas travel unless paths = "direct"."""
    prefetch: Natural = 1
    """Cells ahead of the one that runs whose replicas are fetched."""
    deadline_s: Annotated[float, Field(ge=0, le=MOST_SECONDS)] | None = None
    """A cell waits this long for its replicas; then its tokens go to the homes."""
    checksums: bool = False
    """Verify what arrives."""
    dense: Literal["replicated", "fsdp2"] = "replicated"
    """What is no expert: whole on every rank, or a part of each parameter, gathered when a layer runs."""
    timeout_s: Timeout = 600.0
    """A rank that does not answer for so long in the middle of a stage is taken for dead."""

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.ranks_per_node is not None and self.expert % self.ranks_per_node:
            raise ValueError(
                f"expert = {self.expert} ranks do not fill nodes of ranks_per_node = {self.ranks_per_node}"
            )
        if self.dense == "fsdp2" and self.expert == 1:
            raise ValueError('dense = "fsdp2" spreads parameters over ranks; set expert above 1, or leave it out')
        if self.expert == 1:
            refuse_idle(
                self, ParallelConfig.model_fields, "with expert = 1, one process; set expert, or leave them out"
            )
        if self.deadline_s is not None and self.deadline_s >= self.timeout_s:
            raise ValueError(f"deadline_s = {self.deadline_s} is not below timeout_s = {self.timeout_s}")
        return self
