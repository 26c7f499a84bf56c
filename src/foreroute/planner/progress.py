"""A plan in the making, whose first micro-steps can be taken while later ones are planned."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import PlanOptions
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology

OnProgress = Callable[[int, int], None]
"""Called with the cells planned so far and the cells in all, from a planner's thread."""

LONGEST_BLOCK = 8
"""Micro-steps that one compiled call plans at most; the first plans one, so that execution can begin. Chosen by hand:
longer blocks would hand cells over later, and a call costs little beside eight micro-steps."""
NOT_PLANNED = -1


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
        slots: redundant slots of a rank that the plan may use.
        priced_options: once it is planned, whether "traffic" and "pay_off" are on, and why.
    """

    def __init__(
        self,
        counts_MLGE: NDArray[np.int32],
        topology: Topology,
        options: PlanOptions,
        previous_LE: NDArray[np.int16],
        on_progress: OnProgress | None = None,
    ) -> None:
        """Begin with what `foreroute.planner.start` has checked."""
        self.num_micro_steps = len(counts_MLGE)
        self.slots = topology.redundant_slots if options.replicas else 0
        self.priced_options: dict[str, str] = {}
        self._counts_MLGE, self._topology, self._options = counts_MLGE, topology, options
        self._previous_LE, self._on_progress = previous_LE, on_progress
        self._changed = threading.Condition()
        self._figures_ML2 = np.full((*counts_MLGE.shape[:2], 2), NOT_PLANNED)  # as of `add`
        self._hosts: dict[int, Hosts] = {}  # of some layers each, by the first of them
        self._plan: StepPlan | None = None
        self._error: BaseException | None = None

    @property
    def num_ready(self) -> int:
        """Micro-steps from the first on that are planned, without a gap."""
        missing_M = np.flatnonzero((self._figures_ML2[:, :, 0] == NOT_PLANNED).any(axis=1))
        return int(missing_M[0]) if len(missing_M) else self.num_micro_steps

    def part(self, first: int) -> StepPlan:
        """What is planned from micro-step `first` on, that one at least, as a plan of these micro-steps alone.

        Waits for that micro-step. The part takes slots to be empty before it, and its digest is that of its counts.

        Args:
            first: from 0.

        Raises:
            InputError: when the step has no such micro-step.
        """
        if not 0 <= first < self.num_micro_steps:
            raise InputError(f"there is no micro-step {first} in a step of {self.num_micro_steps} micro-steps")
        with self._changed:
            self._wait(lambda: self.num_ready > first)
            end = self.num_ready
        hosts = Hosts.side_by_side([self._hosts[layer].part(first, end) for layer in sorted(self._hosts)])
        counts_MLGE, num_layers = self._counts_MLGE[first:end], len(hosts.home_LE)
        if first:  # the first replica of each slot is fetched
            layer_R = np.repeat(np.arange(len(hosts.offsets) - 1) % num_layers, np.diff(hosts.offsets))
            slot_R = (layer_R * self._topology.num_ranks + hosts.rank_R) * self.slots + hosts.slot_R
            hosts = hosts._replace(fetched_R=hosts.fetched_R.copy())
            hosts.fetched_R[np.unique(slot_R, return_index=True)[1]] = True
        return StepPlan(
            topology=self._topology,
            previous_home_LE=self._previous_LE,
            hosts=hosts,
            max_load_ML=self._figures_ML2[first:end, :, 0].copy(),
            bound_ML=self._figures_ML2[first:end, :, 1].astype(np.float64),
            counts_digest=counts_digest(counts_MLGE),
            slots=self._options.slots,
        )

    def result(self) -> StepPlan:
        """The whole plan. Waits for it."""
        with self._changed:
            self._wait(lambda: self._plan is not None)
            assert self._plan is not None
            return self._plan

    def add(self, hosts: Hosts, figures_ML2: NDArray[np.int64], begin: int, layer: int) -> None:
        """Called by the planner when a block is planned.

        Args:
            hosts: of the micro-steps so far, of some layers; what is in them stays, and later ones are added to them.
            figures_ML2: int64, of each cell of the block what its slowest rank serves, and `least_load`.
            begin: its first micro-step.
            layer: the first of its layers.
        """
        num_micro_steps, num_layers, _ = figures_ML2.shape
        with self._changed:
            self._hosts[layer] = hosts
            self._figures_ML2[begin : begin + num_micro_steps, layer : layer + num_layers] = figures_ML2
            self._changed.notify_all()
            if self._on_progress is not None:
                planned_ML = self._figures_ML2[:, :, 0] != NOT_PLANNED
                self._on_progress(int(planned_ML.sum()), planned_ML.size)

    def end(self, plan: StepPlan | None, error: BaseException | None = None) -> None:
        """Called by the planner at the end, with the plan, or the error that whoever waits gets."""
        with self._changed:
            self._plan, self._error = plan, error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Let go of the lock until something is ready, or planning has failed."""
        self._changed.wait_for(lambda: ready() or self._error is not None)
        if not ready() and self._error is not None:
            raise self._error
