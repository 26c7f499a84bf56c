# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's FSDP engine with routing replay: what is overridden, and what is replayed in which pass.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.fsdp
    +actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

import torch.distributed as dist
import verl
from transformers import PreTrainedModel
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from foreroute.adapters import hf
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.comparison import over_ranks
from foreroute.trainers.verl.passes import EnginePasses
from foreroute.trainers.verl.protocol import FIELD, routed_experts
from foreroute.trainers.verl.registry import refuse_what_engines_pass_over, take_place
from foreroute.trainers.verl.settings import Replay, replay_of, require_supported

Step = Callable[..., Any]
"""verl's `forward_step(micro_batch, loss_function, forward_only)`."""


class FSDPRoutingReplay:
    """Routing replay for verl's FSDP engines of language models; put it first among the bases.

        class MyEngine(FSDPRoutingReplay, MyFSDPEngine): ...

    What is replayed stands in `router_replay.mode` of the engine's configuration. An engine that only runs forward is a
    reference, and is left alone.

    Attributes:
        replays_routes: what verl's registry is searched for.
        routing: what is replayed in which pass; None in a reference.
    """

    # verl's engine defines these; a mixin only sees them at run time
    engine_config: Any
    model_config: Any
    eval_mode: Any
    replays_routes = True
    routing: FSDPPasses | None = None

    def initialize(self) -> None:
        """Build the model as verl does, and prove replay on it.

        Raises:
            AttachError: when the model is not replayable.
            ConfigError: for settings under which replay is not supported or would have no effect.
        """
        replay = replay_of(self.engine_config)
        if replay != "disabled":
            require_supported(self.engine_config, self.model_config)
        super().initialize()  # type: ignore[misc]
        if replay == "disabled" or self.engine_config.forward_only:
            return
        with self.eval_mode():
            self.routing = FSDPPasses(self, replay)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """The passes of verl over a batch, of which each micro-batch was replayed.

        Raises:
            ReplayError: when one was not.
        """
        run = partial(super().forward_backward_batch, data, loss_function, forward_only)  # type: ignore[misc]
        if self.routing is None and not self.engine_config.forward_only and data.get(FIELD, None) is not None:
            # routes of the rollout are at hand, and no replay was asked for: the mismatch is measured
            self.routing = FSDPPasses(self, "disabled")
        if self.routing is None or self.routing.is_reference:
            return run()
        return self.routing.run_batch(run, data, update=not forward_only)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """A pass of verl over a micro-batch, with its routes."""
        step = super().forward_step  # type: ignore[misc]
        if self.routing is None or self.routing.is_reference:
            return step(micro_batch, loss_function, forward_only)
        return self.routing.step(step, micro_batch, loss_function, update=not forward_only)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The reference pass where the reference is the policy without its adapters."""
        with super().disable_adapter():  # type: ignore[misc]
            if self.routing is None:
                yield
                return
            self.routing.is_reference = True
            try:
                yield
            finally:
                self.routing.is_reference = False


class RoutingReplayEngine(FSDPRoutingReplay, FSDPEngineWithLMHead):
    """verl's FSDP engine of language models with routing replay."""


class FSDPPasses(EnginePasses):
    """The passes of one engine.

    Args:
        engine: verl's, initialised.
        replay: what to replay; nothing is with "disabled", and the same is measured.

    Attributes:
        is_reference: set while adapters are switched off for the reference pass.
    """

    def __init__(self, engine: Any, replay: Replay) -> None:
        # verl's fused forward returns log-probs, and those in a dictionary alone
        model = next(module for module in engine.module.modules() if isinstance(module, PreTrainedModel))
        with patch.object(model, "forward", partial(model.forward, return_dict=True)):
            routed = hf.attach(engine.module)
        super().__init__(engine, routed, replay)
        self.is_reference = False
        self._engine = engine
        self._slices = engine.ulysses_parallel_group  # of the ranks that share packed rows, or None

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[dict[str, float]]:
        """Around a batch of verl. See `EnginePasses`."""
        with super().batch(data, update=update) as logs:
            yield logs
            if update and self._slices is not None:
                self.comparison.metrics.share_native(partial(over_ranks, group=self._slices))

    def step(self, step: Step, micro_batch: Any, loss_function: Any, *, update: bool) -> Any:
        """A `forward_step` of verl on a micro-batch, replayed, recorded and measured as its pass asks for."""
        self._num_steps += 1
        routes = self._routes_of(micro_batch, update=update)
        session = None
        with ExitStack() as stack:
            if routes is not None and self._replay != "disabled":
                if self._replay == "R3":
                    forward, sequences_of = partial(step, micro_batch, None, True), self._joined(micro_batch)
                    self.check_first(routes, forward, sequences_of=sequences_of)
                given = self._given(routes)
                session = stack.enter_context(self.routed.replay(given, missing="native", telemetry=update))
            run = partial(step, micro_batch, loss_function, not update)
            (loss, output), executed = self._recorded(run, micro_batch, update=update)
        if session is not None and update:
            self.comparison.metrics.add_native(session.agreement().routing)
        if executed is not None:
            self._measure(executed, routes, micro_batch, output["model_output"], update=update)
        return loss, output

    def _recorded(self, run: Callable[[], Any], data: Any, *, update: bool) -> tuple[Any, RoutingTrace | None]:
        """What came out of a micro-batch and the routes that it executed, where the batch measures."""
        if not self.comparison.measures(update=update):
            return run(), None
        with self.routed.record() as recording:
            result = run()
        return result, self._joined(data)(recording.trace())

    def _joined(self, data: Any) -> Callable[[RoutingTrace], RoutingTrace]:
        """Makes the sequences of a micro-batch of what this rank recorded in it: the inverse of `_given`."""

        def join(recorded: RoutingTrace) -> RoutingTrace:
            parts = [recorded]
            if self._slices is not None:
                parts *= dist.get_world_size(self._slices)
                dist.all_gather_object(parts, recorded, group=self._slices)
            lengths = data["input_ids"].offsets().diff().cpu().numpy()
            return concatenate(parts).take_rows(np.arange(lengths.sum()), lengths)

        return join

    def _given(self, routes: RoutingTrace) -> RoutingTrace:
        """The rows of this rank: with what verl appends, as a sequence without routes; under Ulysses, its part of them.

        A part begins and ends within sequences, of which it has pieces.
        """
        padding = self._engine._get_packed_pad_size(routes.num_rows)
        num_parts = self._engine.ulysses_sequence_parallel_size
        padding += -(routes.num_rows + padding) % num_parts
        if padding:
            routes = concatenate([routes, RoutingTrace.unrouted(routes.spec, [np.zeros(padding, np.int32)])])
        if self._slices is None:
            return routes
        num_rows = routes.num_rows // num_parts
        start = dist.get_rank(self._slices) * num_rows
        bounds = np.unique(routes.offsets.clip(start, start + num_rows))
        return routes.take_rows(np.arange(*bounds[[0, -1]]), np.diff(bounds))

    def _measure(
        self, executed: RoutingTrace, routes: RoutingTrace | None, micro_batch: Any, result: Any, *, update: bool
    ) -> None:
        """Beside the rollout, in R3 and without replay; with R2, what the updates are to replay."""
        if self._replay == "R2":
            layers = self.routed.model.config.get_text_config().num_hidden_layers
            result[FIELD] = routed_experts(executed, micro_batch, num_hidden_layers=layers)
            routes = None
        self.comparison.add(executed, routes, micro_batch, result.get("log_probs"), update=update)


def register() -> None:
    """Have verl make this engine for the strategies fsdp and fsdp2, and refuse replay where an engine has none.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_overridden("verl", verl.__version__, FSDPRoutingReplay, FSDPEngineWithLMHead)
    for strategy in ("fsdp", "fsdp2"):
        take_place(RoutingReplayEngine, FSDPEngineWithLMHead, strategy)
    refuse_what_engines_pass_over()


register()
