"""How much memory and work a simulation takes, about, so that a small file cannot ask for more than anyone has."""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.errors import ConfigError

MOST_MEMORY = 2 << 30
"""Bytes. 32 micro-steps of all layers of DeepSeek-V3 on 64 ranks take half of it."""
MOST_WORK = 100e9
"""Entries of assignments that are planned and priced, by all methods, at all points of a sweep: hours of one thread."""
CELL_WORK = 10_000
"""What a cell costs beside its entries, in as many of them."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is simulated.

    Attributes:
        groups: expert-parallel groups that are looked at.
        micro_steps: M of a group.
        layers: L that are planned.
        ranks: G.
        experts: E.
        slots: redundant ones of a rank.
        stages: of the pipeline.
        model_layers: that those planned stand for.
    """

    groups: int
    micro_steps: int
    layers: int
    ranks: int
    experts: int
    slots: int
    stages: int
    model_layers: int

    @property
    def cells(self) -> int:
        """Of a group."""
        return self.micro_steps * self.layers

    @property
    def memory(self) -> int:
        """Bytes: counts and shares of all groups, the assignments of one by one method, and its times."""
        drawn = self.groups * self.cells * self.experts * (24 + 12 * self.ranks)
        served = 16 * self.cells * self._entries
        times = 500 * self.micro_steps * self.model_layers * self.ranks
        return drawn + served + times

    @property
    def work(self) -> int:
        """Of one method."""
        of_cells = self.cells * (max(self._entries, CELL_WORK) + self.stages * CELL_WORK // 10)
        return self.groups * (of_cells + self.micro_steps * self.model_layers * self.ranks)

    @property
    def _entries(self) -> int:
        """Of a cell's assignments: tokens by host and source, every slot filled."""
        return self.ranks * (self.experts + self.slots * self.ranks)

    def require(self, source: str) -> None:
        """Refuse what takes too much memory.

        Raises:
            ConfigError: with the size and the bound.
        """
        if self.memory > MOST_MEMORY:
            raise ConfigError(
                f"{source}: {self.groups} groups x {self.micro_steps} micro-steps x {self.layers} of "
                f"{self.model_layers} layers x {self.ranks} ranks with {self.slots} slots x {self.experts} experts "
                f"would take about {self.memory / (1 << 30):,.0f} GB of memory; expected at most {MOST_MEMORY >> 30} "
                "GB. Draw fewer groups, layers or micro-steps, which stand for the others"
            )
