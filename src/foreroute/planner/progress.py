"""What has been planned so far: room for all cells of a step, and a plan in the making whose cells can be taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanLateError
from foreroute.plan.step_plan import REPLICA_ARRAYS, CellPlan, StepPlan

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""


class StepCells(NamedTuple):
    """The cells of a step, C of them in the order of execution, with room for P replicas each: all slots of all ranks.

    Attributes:
        home_LE: int16 [L, E], the homes during the step.
        count_C: int64 [C], how many replicas the cell has.
        max_load_C: int64 [C], assignments of its slowest rank.
        expert_CP, rank_CP, slot_CP, fetched_CP, tokens_CPG: as in `CellPlan`.
    """

    home_LE: NDArray[np.int16]
    count_C: NDArray[np.int64]
    max_load_C: NDArray[np.int64]
    expert_CP: NDArray[np.int16]
    rank_CP: NDArray[np.int16]
    slot_CP: NDArray[np.int16]
    fetched_CP: NDArray[np.bool_]
    tokens_CPG: NDArray[np.int32]

    @classmethod
    def empty(cls, home_LE: NDArray[np.int16], num_micro_steps: int, num_ranks: int, slots: int) -> StepCells:
        """Nothing is planned yet. Pages that are never written take no memory."""
        cells, most = num_micro_steps * len(home_LE), num_ranks * slots
        return cls(
            home_LE,
            np.zeros(cells, np.int64),
            np.zeros(cells, np.int64),
            np.empty((cells, most), np.int16),
            np.empty((cells, most), np.int16),
            np.empty((cells, most), np.int16),
            np.empty((cells, most), np.bool_),
            np.empty((cells, most, num_ranks), np.int32),
        )

    @property
    def of_replicas(self) -> tuple[NDArray[Any], ...]:
        """What there is of each replica, in the order of `REPLICA_ARRAYS`."""
        return self.expert_CP, self.rank_CP, self.slot_CP, self.fetched_CP, self.tokens_CPG

    def cell(self, micro_step: int, layer: int) -> CellPlan:
        """One cell, as views."""
        c = micro_step * len(self.home_LE) + layer
        return CellPlan(self.home_LE[layer], *(array[c, : self.count_C[c]] for array in self.of_replicas))

    def replace_cell(self, micro_step: int, layer: int, cell: CellPlan, max_load: int) -> None:
        """Put another plan of a cell in place of its present one."""
        c = micro_step * len(self.home_LE) + layer
        self.count_C[c], self.max_load_C[c] = len(cell.expert_R), max_load
        for name, array in zip(REPLICA_ARRAYS, self.of_replicas, strict=True):
            array[c, : self.count_C[c]] = getattr(cell, name)

    def step_arrays(self, begin: int, end: int) -> dict[str, Any]:
        """What a `StepPlan` of the micro-steps `begin` to `end` - 1 holds of its cells, by name."""
        cells = slice(begin * len(self.home_LE), end * len(self.home_LE))
        there_CP = np.arange(self.expert_CP.shape[1]) < self.count_C[cells, None]
        return {
            "offsets": np.concatenate([[0], np.cumsum(self.count_C[cells])]),
            "max_load_ML": self.max_load_C[cells].reshape(-1, len(self.home_LE)),
            **{name: array[cells][there_CP] for name, array in zip(REPLICA_ARRAYS, self.of_replicas, strict=True)},
        }


PartOf = Callable[[StepCells, int, int], StepPlan]
"""Makes the plan of the micro-steps from a first to before a last one, all of them planned."""


class PlanInProgress:
    """A plan while it is made; may be used from any thread.

    Cells are planned in the order of execution, so that the first micro-step can run while later ones are planned.

    Attributes:
        num_micro_steps: M, of the whole step.
        levels: once it is planned, whether "traffic" and "pay_off" are on, and why.
    """

    def __init__(self, shape: tuple[int, int], part_of: PartOf, on_progress: OnProgress | None = None) -> None:
        """Of a step of `shape` (M, L); made by `foreroute.planner.start`."""
        self.num_micro_steps = shape[0]
        self.levels: dict[str, str] = {}
        self._part_of, self._on_progress = part_of, on_progress
        self._changed = threading.Condition()
        self._planned_ML = np.zeros(shape, np.bool_)
        self._cells: StepCells | None = None
        self._plan: StepPlan | None = None
        self._error: BaseException | None = None

    @property
    def num_planned(self) -> int:
        """Cells that are planned, of M * L."""
        return int(self._planned_ML.sum())

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
        self._require(micro_step, layer)
        self._wait(lambda: bool(self._planned_ML[micro_step, layer]), timeout, f"cell ({micro_step}, {layer})")
        assert self._cells is not None
        return self._cells.cell(micro_step, layer)

    @property
    def num_ready(self) -> int:
        """Micro-steps from the first on that are planned, without a gap."""
        missing_M = np.flatnonzero(~self._planned_ML.all(axis=1))
        return int(missing_M[0]) if len(missing_M) else self.num_micro_steps

    def part(self, first: int, timeout: float | None = None) -> StepPlan:
        """What is planned from micro-step `first` on, that one at least, as a plan of these micro-steps alone.

        It takes slots to be empty before, and its digest is that of their counts.

        Raises:
            InputError: when the step has no such micro-step.
            PlanLateError: when that one is not planned after `timeout` seconds.
        """
        self._require(first, 0)
        self._wait(lambda: self.num_ready > first, timeout, f"micro-step {first}")
        assert self._cells is not None
        return self._part_of(self._cells, first, self.num_ready)

    def result(self, timeout: float | None = None) -> StepPlan:
        """The whole plan. Waits for it, at most `timeout` seconds.

        Raises:
            PlanLateError: when the time is up.
        """
        self._wait(lambda: self._plan is not None, timeout, "the plan")
        assert self._plan is not None
        return self._plan

    def add(self, cells: StepCells, micro_steps: slice, layers: slice) -> None:
        """Called by the planner when cells are planned."""
        with self._changed:
            self._cells = cells
            self._planned_ML[micro_steps, layers] = True
            self._changed.notify_all()
            if self._on_progress is not None:
                self._on_progress(self.num_planned, self._planned_ML.size)

    def end(self, plan: StepPlan | None, error: BaseException | None = None) -> None:
        """Called by the planner at the end, with the plan, or the error that whoever waits gets."""
        with self._changed:
            self._plan, self._error = plan, error
            self._changed.notify_all()

    def _require(self, micro_step: int, layer: int) -> None:
        num_micro_steps, num_layers = self._planned_ML.shape
        if not (0 <= micro_step < num_micro_steps and 0 <= layer < num_layers):
            raise InputError(
                f"there is no cell ({micro_step}, {layer}) in a step of {num_micro_steps} micro-steps and "
                f"{num_layers} layers"
            )

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: ready() or self._error is not None, timeout)
        if not in_time:
            raise PlanLateError(f"{what} is not planned after {timeout} s; {self.num_planned} cells are")
        if not ready() and self._error is not None:
            raise self._error
