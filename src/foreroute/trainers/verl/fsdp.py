# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's FSDP engine with routing replay: what is overridden, and nothing else. The work is done in `controller.py`.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.fsdp
    +actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

import verl
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from foreroute.errors import AttachError, ConfigError
from foreroute.trainers.checks import require_api
from foreroute.trainers.verl.controller import EnginePassController
from foreroute.trainers.verl.masked_log_probs import log_probs_on_sets
from foreroute.trainers.verl.protocol import FIELD
from foreroute.trainers.verl.settings import KEY, replay_of, require_supported
from foreroute.trainers.verl.weight_sync import watch_vllm_syncs

BACKENDS = ("fsdp", "fsdp2")
OWN_REPLAY = ("megatron", "veomni")
"""Engines that verl itself replays in."""
METHODS = {
    # method of FSDPEngineWithLMHead: parameters that are passed to it, or read from it, by name or place
    "initialize": (),
    "forward_backward_batch": ("data", "loss_function", "forward_only"),
    "forward_step": ("micro_batch", "loss_function", "forward_only"),
    "disable_adapter": (),
    "eval_mode": (),
    "get_data_parallel_group": (),
    "_get_packed_pad_size": ("packed_length",),
}
FIELDS = ("router_replay", "forward_only", "strategy", "ulysses_sequence_parallel_size")


class FSDPRoutingReplay:
    """Routing replay for verl's FSDP engines of language models; put it first among the bases.

        class MyEngine(FSDPRoutingReplay, MyFSDPEngine): ...

    What is replayed stands in `router_replay.mode` of the engine's configuration. An engine that only runs forward is a
    reference, and is left alone.

    Attributes:
        routing: what is replayed in which pass; None in a reference.
    """

    # verl's engine defines these; a mixin only sees them at run time
    engine_config: Any
    eval_mode: Any
    routing: EnginePassController | None = None

    def initialize(self) -> None:
        """Build the model as verl does, and prove replay on it.

        Raises:
            AttachError: when the model is not replayable.
            ConfigError: for settings under which replay is not supported or would have no effect.
        """
        replay = replay_of(self.engine_config)
        if replay != "disabled":
            require_supported(self)
        super().initialize()  # type: ignore[misc]
        if replay == "disabled" or self.engine_config.forward_only:
            return
        with self.eval_mode():
            self.routing = EnginePassController(self, replay)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """The passes of verl over a batch, of which each micro-batch was replayed.

        Raises:
            ReplayError: when one was not.
        """
        run = partial(super().forward_backward_batch, data, loss_function, forward_only)  # type: ignore[misc]
        self._watch_unreplayed(data)
        if self.routing is None or self.routing.is_reference:
            return run()
        with self.routing.batch(data, update=not forward_only) as logs:
            outputs = run()
        outputs["metrics"].update({name: [value] for name, value in logs.items()})
        return outputs

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """A pass of verl over a micro-batch, with its routes; on its sampling masks, which are the reference's too."""
        step = super().forward_step  # type: ignore[misc]
        with log_probs_on_sets(micro_batch):
            if self.routing is None or self.routing.is_reference:
                return step(micro_batch, loss_function, forward_only)
            return self.routing.step(step, micro_batch, loss_function, update=not forward_only)

    def _watch_unreplayed(self, data: Any) -> None:
        """Measure, where routes of the rollout are at hand and no replay was asked for."""
        if self.routing is None and not self.engine_config.forward_only and data.get(FIELD, None) is not None:
            self.routing = EnginePassController(self, "disabled")

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


def register() -> None:
    """Have verl make this engine for the strategies fsdp and fsdp2, and refuse replay where neither has it.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_api("verl", verl, FSDPEngineWithLMHead, METHODS, config=FSDPEngineConfig, fields=FIELDS)
    backends = getattr(EngineRegistry, "_engines", {}).get("language_model", {})
    for backend in BACKENDS:
        engines = backends.get(backend)
        if not engines:
            raise AttachError(f"verl registers no engine for the strategy {backend}; this release is not known")
        for device, engine in engines.items():
            if engine is not FSDPEngineWithLMHead and not issubclass(engine, FSDPRoutingReplay):
                raise AttachError(
                    f"the engine for {backend} on {device} is {engine.__name__}, not verl's own; derive it from "
                    "foreroute.trainers.verl.fsdp.FSDPRoutingReplay"
                )
            engines[device] = RoutingReplayEngine if engine is FSDPEngineWithLMHead else engine
    for backend in backends.keys() - {*BACKENDS, *OWN_REPLAY}:
        backends[backend] = {device: _refusing(engine, backend) for device, engine in backends[backend].items()}


def _refusing(engine: type, backend: str) -> type:
    """The engine, which refuses a replay that it would leave out without a word."""

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if replay_of(self.engine_config) != "disabled":
            raise ConfigError(f"{KEY} is set, and the strategy {backend} has no replay; take fsdp2 or megatron")
        super(refusing, self).initialize(*args, **kwargs)

    refusing: Any = type(engine.__name__, (engine,), {"initialize": initialize})
    return refusing  # type: ignore[no-any-return]


register()
watch_vllm_syncs()
