"""Which of verl's passes is which, and what is replayed in it.

A step of verl is: the rollout, whose routes travel in the batch; the old-log-prob pass, in which the weights are still
those of the rollout (left out in bypass mode); the reference pass, on an engine of its own or with adapters switched
off; then, for each mini-batch, update passes over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.checks import check_first_rollout
from foreroute.trainers.verl.comparison import RolloutComparison
from foreroute.trainers.verl.protocol import FIELD, require_routed, routed_experts, trace_of
from foreroute.trainers.verl.settings import Replay

Step = Callable[..., Any]
"""verl's `forward_step(micro_batch, loss_function, forward_only)`."""


class EnginePassController:
    """The passes of one engine.

    Args:
        engine: verl's, initialised.
        replay: what to replay; nothing is with "disabled", and the same is measured.

    Attributes:
        routed: its model.
        comparison: of the rollout with what ran.
        first_rollout_checked: whether the first routes of the rollout were held against the model's own.
        is_reference: set while adapters are switched off for the reference pass.
    """

    def __init__(self, engine: Any, replay: Replay) -> None:
        self.first_rollout_checked = False
        self.is_reference = False
        self.routed = hf.attach(engine.module)
        self._engine = engine
        self._replay = replay
        self.comparison = RolloutComparison(
            self.routed.spec, engine.get_data_parallel_group, judges_weights=replay == "R3"
        )
        self._num_steps = 0

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """`RolloutComparison.batch`.

        Raises:
            ReplayError: when no micro-batch went through `forward_step`.
        """
        before = self._num_steps
        with self.comparison.batch(update=update) as logs:
            yield logs
            if self._num_steps == before:
                raise ReplayError(
                    f"{type(self._engine).__name__} ran a batch of {len(data)} without forward_step, so that nothing "
                    "was replayed in it"
                )

    def step(self, step: Step, micro_batch: Any, loss_function: Any, *, update: bool) -> Any:
        """A `forward_step` of verl on a micro-batch, replayed, recorded and measured as its pass asks for."""
        self._num_steps += 1
        routes = self._routes_of(micro_batch, update=update)
        session = recording = None
        with ExitStack() as stack:
            if routes is not None and self._replay != "disabled":
                if not self.first_rollout_checked and self._replay == "R3":
                    check_first_rollout(self.routed, routes, partial(step, micro_batch, None, True))
                    self.first_rollout_checked = True
                replayed = self._with_padding(routes)
                session = stack.enter_context(self.routed.replay(replayed, missing="native", telemetry=update))
            if self.comparison.measures(update=update):
                recording = stack.enter_context(self.routed.record())
            loss, output = step(micro_batch, loss_function, not update)
        if session is not None and update:
            self.comparison.metrics.add_native(session.agreement().routing)
        if recording is not None:
            self._measure(recording.trace(), routes, micro_batch, output, update=update)
        return loss, output

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

    def _with_padding(self, routes: RoutingTrace) -> RoutingTrace:
        """And, as a sequence without routes, the tokens that verl appends under `pad_to_length`."""
        padding = self._engine._get_packed_pad_size(routes.num_rows)
        if not padding:
            return routes
        return concatenate([routes, RoutingTrace.unrouted(routes.spec, [np.zeros(padding, np.int32)])])

    def _measure(
        self, recorded: RoutingTrace, routes: RoutingTrace | None, micro_batch: Any, output: Any, *, update: bool
    ) -> None:
        """Beside the rollout, in R3 and without replay; with R2, what the updates are to replay."""
        executed = recorded.select(np.arange(len(micro_batch)))
        result = output["model_output"]
        if self._replay == "R2":
            config: Any = self.routed.model.config
            layers = config.get_text_config().num_hidden_layers
            result[FIELD] = routed_experts(executed, micro_batch, num_hidden_layers=layers)
            routes = None
        self.comparison.add(executed, routes, micro_batch, result.get("log_probs"), update=update)
