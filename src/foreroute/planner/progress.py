"""A plan in the making, whose first micro-steps can be taken while later ones are planned."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, PlanLateError
from foreroute.plan.hosts import Hosts
from foreroute.plan.step_plan import StepPlan

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""

PartOf = Callable[[Hosts, NDArray[np.int64], int], StepPlan]
"""Makes the plan of consecutive micro-steps from their hosts, their largest loads [M, L] and the first one's number."""


LONGEST_BLOCK = 8
"""Micro-steps that one compiled call plans at most; the first plans one, so that execution can begin. Chosen by hand:
longer blocks would hand cells over later, and a call costs little beside eight micro-steps."""


def block_ends(num_micro_steps: int) -> list[int]:
    """Where the blocks of micro-steps end that are planned at once: 1, 2, 4, 8, then every `LONGEST_BLOCK`."""
    ends = [1]
    while ends[-1] < num_micro_steps:
        ends.append(min(2 * ends[-1], ends[-1] + LONGEST_BLOCK, num_micro_steps))
    return ends


class PlanInProgress:
    """A plan while it is made; may be used from any thread.

    Cells are planned in the order of execution, so that the first micro-step can run while later ones are planned.

    Attributes:
        num_micro_steps: M, of the whole step.
        priced_options: once it is planned, whether "traffic" and "pay_off" are on, and why.
    """

    def __init__(self, shape: tuple[int, int], part_of: PartOf, on_progress: OnProgress | None = None) -> None:
        """Of a step of `shape` (M, L); made by `foreroute.planner.start`."""
        self.num_micro_steps = shape[0]
        self.priced_options: dict[str, str] = {}
        self._part_of, self._on_progress = part_of, on_progress
        self._changed = threading.Condition()
        self._planned_ML = np.zeros(shape, np.bool_)
        self._max_load_ML = np.zeros(shape, np.int64)
        # of every micro-step the parts that came, by their first layer
        self._parts_M: list[dict[int, Hosts]] = [{} for _ in range(shape[0])]
        self._plan: StepPlan | None = None
        self._error: BaseException | None = None

    @property
    def num_planned(self) -> int:
        """Cells that are planned, of M * L."""
        return int(self._planned_ML.sum())

    @property
    def num_ready(self) -> int:
        """Micro-steps from the first on that are planned, without a gap."""
        missing_M = np.flatnonzero(~self._planned_ML.all(axis=1))
        return int(missing_M[0]) if len(missing_M) else self.num_micro_steps

    def part(self, first: int, timeout: float | None = None) -> StepPlan:
        """What is planned from micro-step `first` on, that one at least, as a plan of these micro-steps alone.

        It takes slots to be empty before, and its digest is that of their counts.

        Args:
            first: from 0.
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            InputError: when the step has no such micro-step.
            PlanLateError: when that one is not planned in time. The plan goes on; asking again is fine.
        """
        if not 0 <= first < self.num_micro_steps:
            raise InputError(f"there is no micro-step {first} in a step of {self.num_micro_steps} micro-steps")
        self._wait(lambda: self.num_ready > first, timeout, f"micro-step {first}")
        end = self.num_ready
        side_by_side = [[parts[layer] for layer in sorted(parts)] for parts in self._parts_M[first:end]]
        return self._part_of(Hosts.joined(side_by_side), self._max_load_ML[first:end].copy(), first)

    def result(self, timeout: float | None = None) -> StepPlan:
        """The whole plan. Waits for it, at most `timeout` seconds.

        Raises:
            PlanLateError: when the time is up.
        """
        self._wait(lambda: self._plan is not None, timeout, "the plan")
        assert self._plan is not None
        return self._plan

    def add(self, planned: tuple[Hosts, NDArray[np.int64]], micro_steps: slice, layers: slice) -> None:
        """Called by the planner with the hosts and the largest loads [m, l] of a block, for each in order."""
        hosts, max_load_ML = planned
        with self._changed:
            for m in range(micro_steps.start, micro_steps.stop):
                self._parts_M[m][layers.start] = hosts.part(m - micro_steps.start, m - micro_steps.start + 1)
            self._max_load_ML[micro_steps, layers] = max_load_ML
            self._planned_ML[micro_steps, layers] = True
            self._changed.notify_all()
            if self._on_progress is not None:
                self._on_progress(self.num_planned, self._planned_ML.size)

    def end(self, plan: StepPlan | None, error: BaseException | None = None) -> None:
        """Called by the planner at the end, with the plan, or the error that whoever waits gets."""
        with self._changed:
            self._plan, self._error = plan, error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: ready() or self._error is not None, timeout)
        if not in_time:
            raise PlanLateError(f"{what} is not planned after {timeout} s; {self.num_planned} cells are")
        if not ready() and self._error is not None:
            raise self._error
