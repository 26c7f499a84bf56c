"""A plan in the making: cells can be taken as soon as they are planned."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.cells.blocks import Block
from foreroute.balance.step_plan import CellPlan, StepPlan
from foreroute.errors import InputError, PlanLateError

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""


class PlanInProgress:
    """A plan while it is made; may be used from any thread.

    Cells are planned in the order of execution, so that the first micro-step can run while later ones are planned.
    """

    def __init__(self, shape: tuple[int, int], on_progress: OnProgress | None = None) -> None:
        """Of a step of `shape` (M, L); made by `foreroute.balance.planner.start`."""
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
            for micro_step in range(block.begin, block.end):
                for layer in range(block.first_layer, block.first_layer + block.num_layers):
                    self._block_of[micro_step, layer] = block
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
