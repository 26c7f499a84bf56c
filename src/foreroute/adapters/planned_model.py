"""Plans of a model in every framework: it counts its routes, and executes a plan on its experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.replay import RoutedModel
from foreroute.trace import RoutingTrace

# Attaching loads nothing of plans: where somebody plans, `_experts` imports what executes them.
if TYPE_CHECKING:
    from foreroute.ep import ExpertParallelModel, PlanExecution
    from foreroute.ep.execution import ExecutionHolder, MicroBatch
    from foreroute.ep.transfer.engine import TransferOptions
    from foreroute.plan import StepPlan


class PlannedModel(RoutedModel):
    """A model whose experts execute plans. `foreroute.ep.ExpertParallelModel` has each method in full, with its errors.

    Attributes:
        spread: its experts, on which plans are executed; None where they are not spread over ranks for that.
    """

    spread: ExpertParallelModel | None

    @property
    @abstractmethod
    def _experts(self) -> ExpertParallelModel:
        """`spread`; raises `AttachError` where no plan can be executed."""

    @property
    @abstractmethod
    def _execution_holder(self) -> ExecutionHolder:
        """Holder of the executed plan, where layers look for it."""

    @abstractmethod
    def _planned_batches(self, given: Sequence[Any]) -> list[MicroBatch]:
        """Return the micro-batches of this rank as plans know them; raise `TraceError` for what is none."""

    def gather_counts(self, micro_batches: Sequence[Any]) -> NDArray[np.int32]:
        """Count the routes of all ranks: int32 [M, L, G, E].

        Args:
            micro_batches: of this rank, in the order in which they will run: on Hugging Face traces, or what `rows`
                made of them; on Megatron-Core what `shard` made of them.
        """
        return self._experts.gather_counts(partial(self._planned_batches, micro_batches))

    def execute(
        self,
        plan: StepPlan | None,
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
        micro_batches: Sequence[Any],
        *,
        step: int | None = None,
    ) -> AbstractContextManager[PlanExecution]:
        """Execute a plan while the context is open.

        Args:
            plan: of these micro-batches; None computes every expert at its home.
            planned: counts [M, L, G, E] of `gather_counts` that it was made for, or the traces of the whole step.
            micro_batches: as in `gather_counts`; the same objects that sessions replay, or that batches bring.
            step: of the optimizer; executions of one number load weights once.
        """
        batches = partial(self._planned_batches, micro_batches)
        return self._experts.execute(self._execution_holder, plan, planned, batches, step)

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the expert-parallel rank that every expert of the whole model lives on now."""
        return self._experts.home_LE

    @property
    def block_home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes that the framework gives experts when it builds a model, and saves and loads it."""
        return self._experts.block_home_LE

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """Give all ranks the plan that the first one makes."""
        return self._experts.share_plan(make)

    def use(self, transfers: TransferOptions) -> None:
        """Say how weights of replicas travel."""
        self._experts.use(transfers)

    def move_homes(self, homes: StepPlan | NDArray[np.integer], optimizer: Any = None) -> int:
        """Move experts to other ranks, and return the bytes received."""
        return self._experts.move_homes(homes, optimizer)

    def close(self) -> None:
        """Release what weights of replicas travel by, if any do."""
        if self.spread is not None:
            self.spread.close()
