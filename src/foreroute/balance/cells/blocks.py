"""Blocks of cells: the layers of one worker over a few micro-steps, planned by one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.step_plan import CellPlan


@dataclass(frozen=True, eq=False)
class Block:
    """What was planned of the micro-steps `begin` to `end` of the layers from `first_layer` on.

    Attributes:
        ends_C: int64 [cells], cell c of the block owns the replicas up to `ends_C[c]`; cells are in execution order.
        expert_R, rank_R, slot_R, fetched_R, tokens_RG: as in `CellPlan`.
        max_load_C: int64 [cells].
    """

    begin: int
    end: int
    first_layer: int
    num_layers: int
    ends_C: NDArray[np.int64]
    expert_R: NDArray[np.int16]
    rank_R: NDArray[np.int16]
    slot_R: NDArray[np.int16]
    fetched_R: NDArray[np.bool_]
    tokens_RG: NDArray[np.int32]
    max_load_C: NDArray[np.int64]

    def cell(self, micro_step: int, layer: int, home_E: NDArray[np.int16]) -> CellPlan:
        """One cell, as views."""
        c = (micro_step - self.begin) * self.num_layers + layer - self.first_layer
        part = slice(int(self.ends_C[c - 1]) if c else 0, int(self.ends_C[c]))
        return CellPlan(
            home_E,
            self.expert_R[part],
            self.rank_R[part],
            self.slot_R[part],
            self.fetched_R[part],
            self.tokens_RG[part],
        )


def empty_block(begin: int, end: int, layers: range, num_ranks: int, slots: int) -> Block:
    """Room for the most replicas that there can be; pages that are never written take no memory."""
    cells = (end - begin) * len(layers)
    rows = cells * num_ranks * slots
    return Block(
        begin,
        end,
        layers.start,
        len(layers),
        np.zeros(cells, np.int64),
        np.empty(rows, np.int16),
        np.empty(rows, np.int16),
        np.empty(rows, np.int16),
        np.empty(rows, np.bool_),
        np.empty((rows, num_ranks), np.int32),
        np.zeros(cells, np.int64),
    )


def block_of(block: Block, cells: Sequence[CellPlan], max_load_C: NDArray[np.int64]) -> Block:
    """The same micro-steps and layers with other cells, in execution order."""
    names = ("expert_R", "rank_R", "slot_R", "fetched_R", "tokens_RG")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(cell, name) for cell in cells]) for name in names}
    ends_C = np.cumsum([len(cell.expert_R) for cell in cells]).astype(np.int64)
    return replace(block, ends_C=ends_C, max_load_C=max_load_C, **arrays)


def joined(blocks: Sequence[Block], num_micro_steps: int, num_layers: int) -> dict[str, Any]:
    """The arrays of a `StepPlan` from blocks that together cover every cell once."""
    cells = [
        (m * num_layers + layer, b, (m - block.begin) * block.num_layers + layer - block.first_layer)
        for b, block in enumerate(blocks)
        for m in range(block.begin, block.end)
        for layer in range(block.first_layer, block.first_layer + block.num_layers)
    ]
    cells.sort()
    begins = [np.concatenate([[0], block.ends_C]) for block in blocks]
    firsts = np.cumsum([0] + [int(block.ends_C[-1]) for block in blocks])
    begin_C = np.array([firsts[b] + begins[b][c] for _, b, c in cells], np.int64)
    count_C = np.array([begins[b][c + 1] - begins[b][c] for _, b, c in cells], np.int64)
    offsets = np.concatenate([[0], np.cumsum(count_C)]).astype(np.int64)
    order = np.repeat(begin_C - offsets[:-1], count_C) + np.arange(offsets[-1])
    arrays: dict[str, Any] = {"offsets": offsets}
    for name in ("expert_R", "rank_R", "slot_R", "fetched_R", "tokens_RG"):
        parts = [getattr(block, name)[: block.ends_C[-1]] for block in blocks]
        arrays[name] = np.concatenate(parts)[order]
    max_load_C = np.array([blocks[b].max_load_C[c] for _, b, c in cells], np.int64)
    return arrays | {"max_load_ML": max_load_C.reshape(num_micro_steps, num_layers)}
