"""What verl's engines have in common: batches of micro-batches, each replayed, recorded, measured, and counted.

A step of verl is: the rollout, whose routes travel in the batch; the old-log-prob pass, in which the weights are still
those of the rollout (left out in bypass mode); the reference pass, on an engine of its own or with adapters switched
off; then, for each mini-batch, update passes over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foreroute.errors import ReplayError
from foreroute.replay import RoutedModel
from foreroute.trace import RoutingTrace
from foreroute.trainers.checks import check_first_rollout
from foreroute.trainers.verl.comparison import RolloutComparison
from foreroute.trainers.verl.protocol import FIELD, require_routed, trace_of
from foreroute.trainers.verl.settings import Replay


class EnginePasses:
    """The passes of one engine.

    Args:
        engine: verl's, initialised.
        routed: its model.
        replay: what to replay. Under R3 both sides take the same routes, so that what is left tells of their weights.

    Attributes:
        routed: its model.
        comparison: of the rollout with what ran.
        first_rollout_checked: whether the first routes of the rollout were held against the model's own.
    """

    def __init__(self, engine: Any, routed: RoutedModel, replay: Replay) -> None:
        self.first_rollout_checked = False
        self.routed: Any = routed
        self.comparison = RolloutComparison(engine.get_data_parallel_group, judges_weights=replay == "R3")
        self._replay = replay
        self._name = type(engine).__name__
        self._num_steps = 0

    def run_batch(self, run: Callable[[], Any], data: Any, *, update: bool) -> Any:
        """Verl's `forward_backward_batch`, with the mismatch among the metrics that it returns.

        Raises:
            ReplayError: when a micro-batch did not go through `forward_step`.
        """
        with self.batch(data, update=update) as logs:
            outputs = run()
        if "metrics" in outputs:  # of the last stage, which verl asks
            outputs["metrics"].update({name: [value] for name, value in logs.items()})
        return outputs

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """Around a batch of verl; see `RolloutComparison.batch` for what it yields.

        Raises:
            ReplayError: when no micro-batch went through `forward_step`.
        """
        before = self._num_steps
        with self.comparison.batch(update=update) as logs:
            yield logs
            if self._num_steps == before:
                raise ReplayError(
                    f"{self._name} ran a batch of {len(data)} without forward_step, so that nothing was replayed in it"
                )

    def check_first(
        self,
        routes: RoutingTrace,
        forward: Callable[[], object],
        *,
        sequences_of: Callable[[RoutingTrace], RoutingTrace],
    ) -> None:
        """`check_first_rollout`, once in the life of the engine."""
        if not self.first_rollout_checked:
            check_first_rollout(self.routed, routes, forward, sequences_of=sequences_of)
            self.first_rollout_checked = True

    def _routes_of(self, micro_batch: Any, *, update: bool) -> RoutingTrace | None:
        """What is to be replayed, or measured against; None where there is nothing."""
        has_routes = micro_batch.get(FIELD, None) is not None
        if self._replay == "disabled" and not has_routes:
            return None
        if self._replay == "R2" and not update:
            if has_routes:
                raise ReplayError(
                    f"router_replay.mode is R2 and the rollout brought {FIELD!r}; set "
                    "rollout.enable_rollout_routing_replay=False, or take R3"
                )
            return None
        if self._replay == "R2" and not has_routes:
            raise ReplayError(
                f"router_replay.mode is R2, and the update has no {FIELD!r} of an old-log-prob pass: verl ran none, or "
                "did not keep its output"
            )
        routes = trace_of(micro_batch, model=self.routed.spec)
        if self._replay != "disabled":
            require_routed(routes, micro_batch)
        return routes
