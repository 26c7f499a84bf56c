"""Sequences and homes of a step without replicas: packed for the homes, and the homes placed for the packing, in turn.

Which sequences share a micro-step and where experts live decide together how level ranks are, and neither moves a
weight during the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.layout.packing import Packing, exchange_sequences
from foreroute.plan.topology import Topology
from foreroute.planner.homes import place_homes

TURNS = 2
"""Rounds of placing homes and packing sequences. Chosen by figures: on two steps of recorded routes on 4 to 16 ranks,
a second turn takes 0 to 2.6 % off the slowest ranks, and a third 0.5 % at most."""

WHOLE_STEP = 4
"""A whole step weighs as much as a micro-step with a quarter of its assignments. Chosen by figures: on five pairs of
steps, homes of this step do not differ by it, and the worst that are a step old reach 1.035 in place of 1.041 of the
mean on 8 ranks with four sequences each, 1.114 in place of 1.119 on 16; on average they do not differ."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequences:
    """The sequences of a step, and where they are.

    Attributes:
        packing: of S sequences.
        lengths_S: int64 [S], tokens.
        counts_SLE: integers [S, L, E], assignments.
        token_budget: most tokens of a rank in a micro-step.
        square_cost: as in `pack_sequences`.
    """

    packing: Packing
    lengths_S: NDArray[np.int64]
    counts_SLE: NDArray[np.integer]
    token_budget: int
    square_cost: float

    def counts_MLGE(self) -> NDArray[np.int32]:
        """Count the assignments of micro-steps and ranks: int32 [M, L, G, E]."""
        return np.ascontiguousarray(self.packing.sums(self.counts_SLE).swapaxes(1, 2), np.int32)

    def packed_for(self, home_LE: NDArray[np.integer]) -> PackedSequences:
        """Exchange sequences, so that experts at these homes are level."""
        packing = exchange_sequences(
            self.packing,
            self.lengths_S,
            self.counts_SLE,
            homes=home_LE,
            token_budget=self.token_budget,
            square_cost=self.square_cost,
            keep_ranks=False,
        )
        return replace(self, packing=packing)

    def with_homes(
        self, topology: Topology, home_LE: NDArray[np.integer], *, max_moves: int | None = None
    ) -> tuple[PackedSequences, NDArray[np.int16]]:
        """Place homes, int16 [L, E], from those that are there, and exchange sequences, so that ranks are level.

        `max_moves` are as in `place_homes`. The most level of all turns is taken.
        """
        found: list[tuple[int, PackedSequences, NDArray[np.int16]]] = []
        packed, start_LE = self, home_LE
        for _ in range(TURNS):
            counts = packed.counts_MLGE()
            # what no packing changes, and other sequences of the next step hardly do, counts beside the micro-steps
            whole = (counts.sum(axis=0, dtype=np.int64) // WHOLE_STEP).astype(np.int32)
            placed_LE = place_homes(np.concatenate([counts, whole[None]]), topology, start_LE, max_moves=max_moves)
            # from the same packing in each turn, so that attention grows once
            packed = self.packed_for(placed_LE)
            certificate = packed.packing.certificate
            assert certificate is not None, "it was packed by routes"
            found.append((certificate.slowest, packed, placed_LE))
            if max_moves is None:  # moves are counted from the homes that are there
                start_LE = placed_LE
        _, packed, placed_LE = min(found, key=lambda turn: turn[0])
        return packed, placed_LE
