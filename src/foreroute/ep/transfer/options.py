"""What transfers did, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foreroute.ep.transfer.cell import Cell
from foreroute.ep.transfer.host_memory import DIRECTORY
from foreroute.ep.transfer.moves import Paths
from foreroute.errors import ConfigError
from foreroute.plan.options import SlotUse


@dataclass(frozen=True)
class TransferOptions:
    """How weights travel. The same on all ranks.

    Attributes:
        paths: "direct", from peer to peer; "host", through host memory within a node and from peer to peer between
            nodes; or "auto", which takes the one that is expected to end sooner, move by move.
        slots: "layer": redundant slots per layer, which keep what they hold. "shared": sets of slots shared by all
            layers, one for the cell that runs and one for each that is prefetched.
        prefetch: cells ahead of the one that runs whose replicas are fetched; 0 fetches them when they are needed.
        deadline_s: a cell waits this long for its replicas; then its tokens go to the homes. None waits `timeout_s`.
        checksums: verify every row that arrives, weights and gradients, at the cost of hashing them.
        timeout_s: a rank that does not answer for so long is taken for dead.
        directory: of node-shared memory.
    """

    paths: Paths = "auto"
    slots: SlotUse = "shared"
    prefetch: int = 1
    deadline_s: float | None = None
    checksums: bool = False
    timeout_s: float = 600.0
    directory: Path = DIRECTORY

    def __post_init__(self) -> None:
        if self.paths not in ("auto", "host", "direct"):
            raise ConfigError(f"paths is {self.paths!r}; expected 'auto', 'host' or 'direct'")
        if self.slots not in ("layer", "shared"):
            raise ConfigError(f"slots is {self.slots!r}; expected 'layer' or 'shared'")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 cells or more")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; expected more than 0 seconds")
        if self.deadline_s is not None and not 0 <= self.deadline_s < self.timeout_s:
            raise ConfigError(f"deadline_s is {self.deadline_s}; expected 0 to less than timeout_s = {self.timeout_s}")

    @property
    def votes(self) -> bool:
        """Whether ranks ask each other before a cell whether its replicas have arrived."""
        return self.checksums or self.deadline_s is not None


@dataclass(frozen=True)
class TransferRecord:
    """One call of the transfer engine on one rank.

    Attributes:
        cell: that it was for.
        kind: "fetch" of weights, or "return" of gradients.
        host_bytes: that came here through host memory and were waited for in this call, those of vain attempts and
            of prefetches that nobody asked for among them; 0 when slots held everything.
        direct_bytes: the same from peers.
        exposed_s: seconds that the caller waited.
        prefetched: the transfer had begun before it was asked for.
        at_home_because: what went wrong on which ranks, when the home placement is in force for the cell; else None.
    """

    cell: Cell
    kind: Literal["fetch", "return"]
    host_bytes: int
    direct_bytes: int
    exposed_s: float
    prefetched: bool = False
    at_home_because: str | None = None
