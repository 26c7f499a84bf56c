"""Plans in TRL: an accumulation window is counted, planned and executed, and so is an old-log-prob pass.

The routes of a generation batch are known before the first pass over it, and TRL keeps the micro-batches that it is
split into. So when the first micro-batch of an optimizer step begins, all of them are known. Where TRL generates again
within an optimizer step, the micro-batches up to there are a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from foreroute.adapters.hf import RoutedTransformer
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.costs.cluster_file import Cluster
from foreroute.errors import ConfigError, shown
from foreroute.plan import Topology
from foreroute.trainers.plans import PlannedPasses, plan_options


class PlannedWindows(PlannedPasses):
    """Plans of the passes of one trainer.

    Raises `AttachError` when foreroute does not spread the experts of the policy, and `ConfigError` for ranks, or
    slots, that no plan can be made for, and options that windows cannot carry out.
    """

    def __init__(
        self, trainer: Any, routed: RoutedTransformer, planned_for: Topology | Cluster, options: object
    ) -> None:
        if not isinstance(planned_for, Topology | Cluster):
            raise ConfigError(f"topology is {shown(planned_for)}; expected a Topology, or what load_cluster() gives")
        costs, topology, num_ranks = None, planned_for, int(routed.home_LE.max()) + 1
        if isinstance(topology, Cluster):
            costs, topology = replace(topology.costs, paths="direct"), topology.topology
        if topology.num_ranks != num_ranks or not topology.redundant_slots:
            raise ConfigError(
                f"the topology has {topology.num_ranks} ranks of {topology.redundant_slots} slots; "
                f"expected {num_ranks}, which share the experts of a layer, and slots for replicas, as homes stay"
            )
        super().__init__(routed, topology, costs, plan_options(options, costs))
        self._trainer = trainer
        self._open, self._num_left, self._num_in_step = ExitStack(), 0, 0

    def begin(self, routes_in: Callable[[dict[str, Any]], TraceRows]) -> None:
        """Begin a window with an update pass, unless one is open; a collective call then.

        `routes_in` gives the routes of one of the micro-batches that TRL keeps.
        """
        if self._num_left:
            return
        trainer, batches = self._trainer, self._trainer._buffered_inputs
        # the window ends where TRL generates again or the optimizer steps, whichever comes first
        num_of_rollout = trainer.args.steps_per_generation * trainer.num_iterations
        num_left = min(
            num_of_rollout - trainer._step % num_of_rollout,
            trainer.current_gradient_accumulation_steps - self._num_in_step,
        )
        numbers = range(trainer._step, trainer._step + num_left)
        window = [routes_in(batches[number % len(batches)]) for number in numbers]
        self._open.enter_context(self.executing(window, "update"))
        self._num_left = num_left

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        """Run one of TRL's training steps, after whose backward a window may end; an error ends it too.

        Raises `ReplayError` on every rank alike, when the optimizer steps before all of a window has run.
        """
        with self._open as stack:
            try:
                yield
            except BaseException:
                self._num_left = self._num_in_step = 0
                raise
            is_last = bool(self._trainer.accelerator.sync_gradients)
            self._num_in_step = 0 if is_last else self._num_in_step + 1
            self._num_left = 0 if is_last else max(self._num_left - 1, 0)
            if self._num_left:
                self._open = stack.pop_all()
