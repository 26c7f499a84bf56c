"""What has been planned so far: blocks of cells, and a plan in the making whose cells can be taken one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanLateError
from foreroute.plan.step_plan import REPLICA_ARRAYS, CellPlan, StepPlan, replicas_of

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""


class Block(NamedTuple):
    """The layers of one worker over a few micro-steps, planned by one compiled call.

    It holds what was planned of the micro-steps `begin` to `end` of the layers from `first_layer` on.

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

    def places(self) -> list[tuple[int, int]]:
        """Micro-step and layer of every cell."""
        layers = range(self.first_layer, self.first_layer + self.num_layers)
        return [(m, layer) for m in range(self.begin, self.end) for layer in layers]

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
    ends_C = np.cumsum([len(cell.expert_R) for cell in cells]).astype(np.int64)
    return block._replace(ends_C=ends_C, max_load_C=max_load_C, **replicas_of(cells))


def joined_blocks(blocks: Sequence[Block], num_micro_steps: int, num_layers: int) -> dict[str, Any]:
    """The arrays of a `StepPlan` from blocks that together cover every cell once."""
    number_C = np.array([m * num_layers + layer for block in blocks for m, layer in block.places()])
    count_C = np.concatenate([np.diff(block.ends_C, prepend=0) for block in blocks])
    order_C = np.argsort(number_C)
    begin_C = (np.cumsum(count_C) - count_C)[order_C]
    offsets = np.concatenate([[0], np.cumsum(count_C[order_C])]).astype(np.int64)
    order = np.repeat(begin_C - offsets[:-1], count_C[order_C]) + np.arange(offsets[-1])
    arrays: dict[str, Any] = {"offsets": offsets}
    for name in REPLICA_ARRAYS:
        arrays[name] = np.concatenate([getattr(block, name)[: block.ends_C[-1]] for block in blocks])[order]
    max_load_C = np.concatenate([block.max_load_C for block in blocks])[order_C]
    return arrays | {"max_load_ML": max_load_C.reshape(num_micro_steps, num_layers)}


class PlanInProgress:
    """A plan while it is made; may be used from any thread.

    Cells are planned in the order of execution, so that the first micro-step can run while later ones are planned.
    """

    def __init__(self, shape: tuple[int, int], on_progress: OnProgress | None = None) -> None:
        """Of a step of `shape` (M, L); made by `foreroute.planner.start`."""
        self._shape = shape
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._block_of: dict[tuple[int, int], Block] = {}
        self._home_LE: NDArray[np.int16] | None = None
        self._plan: StepPlan | None = None
        self._error: BaseException | None = None

    @property
    def num_planned(self) -> int:
        """Cells that are planned, of M * L."""
        return len(self._block_of)

    def cell(self, micro_step: int, layer: int, timeout: float | None = None) -> CellPlan:
        """One cell, as soon as it is planned.

        Args:
            micro_step: from 0.
            layer: from 0, counting routed layers.
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            InputError: when the step has no such cell.
            PlanLateError: when the time is up. The plan goes on; asking again is fine.
        """
        if not (0 <= micro_step < self._shape[0] and 0 <= layer < self._shape[1]):
            raise InputError(
                f"there is no cell ({micro_step}, {layer}) in a step of {self._shape[0]} micro-steps and "
                f"{self._shape[1]} layers"
            )
        self._wait(lambda: (micro_step, layer) in self._block_of, timeout, f"cell ({micro_step}, {layer})")
        assert self._home_LE is not None
        return self._block_of[micro_step, layer].cell(micro_step, layer, self._home_LE[layer])

    def result(self, timeout: float | None = None) -> StepPlan:
        """The whole plan. Waits for it, at most `timeout` seconds.

        Raises:
            PlanLateError: when the time is up.
        """
        self._wait(lambda: self._plan is not None, timeout, "the plan")
        assert self._plan is not None
        return self._plan

    def settle_homes(self, home_LE: NDArray[np.int16]) -> None:
        """Called by the planner, once, before the first block: int16 [L, E]."""
        self._home_LE = home_LE

    def add(self, block: Block) -> None:
        """Called by the planner when a block of cells is planned."""
        with self._changed:
            self._block_of |= dict.fromkeys(block.places(), block)
            self._changed.notify_all()
            if self._on_progress is not None:
                self._on_progress(self.num_planned, self._shape[0] * self._shape[1])

    def finish(self, plan: StepPlan) -> None:
        """Called by the planner at the end."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Called by the planner when it cannot go on; whoever waits gets the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: ready() or self._error is not None, timeout)
        if not in_time:
            raise PlanLateError(f"{what} is not planned after {timeout} s; {self.num_planned} cells are")
        if not ready() and self._error is not None:
            raise self._error
