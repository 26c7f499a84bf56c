# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's Megatron engine with foreroute's replay, and with plans: what is overridden. The work is done elsewhere.

verl imports this module in every worker when it is told to, and then makes its engines from here:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.megatron
    actor_rollout_ref.actor.megatron.router_replay.mode=R3
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True

Routes are replayed by foreroute's hooks in the place of verl's: a plan is executed on the rows of a replay, whose
micro-batch is known in every recomputation too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import verl
from verl.workers.config import EngineRouterReplayConfig, McoreEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.errors import AttachError
from foreroute.trainers.checks import require_api
from foreroute.trainers.verl.megatron_passes import MegatronPasses
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.settings import replay_of, require_supported_by_megatron
from foreroute.trainers.verl.weight_sync import watch_vllm_syncs

METHODS = {
    # method of MegatronEngineWithLMHead: parameters that are passed to it, by name or place
    "initialize": (),
    "forward_backward_batch": ("data", "loss_function", "forward_only"),
    "forward_step": ("batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
    "eval_mode": (),
    "get_data_parallel_group": (),
}
DEVICE = "cuda"
"""On others verl has an engine of other makers, which keeps its own replay."""
FIELDS = ("router_replay", "forward_only", "tensor_model_parallel_size", "use_remove_padding")


class MegatronRoutingReplay(MegatronEngineWithLMHead):
    """verl's Megatron engine of language models with routing replay, and plans where its configuration has them.

    An engine that only runs forward is a reference, and is left alone.

    Attributes:
        executes_plans: what `PlanningMegatronConfig` looks for in an engine.
        routing: what is replayed in which pass; None where nothing is.

    Raises:
        AttachError: for a release of mbridge that does not work.
        ConfigError: for settings under which replay is not supported, and plans without replay.
    """

    executes_plans = True
    routing: MegatronPasses | None = None

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        self._replays = replay_of(engine_config) != "disabled" and not engine_config.forward_only
        plans = isinstance(engine_config, PlanningMegatronConfig)
        require_supported_by_megatron(engine_config, model_config, replays=self._replays, plans=plans)
        if self._replays:
            if engine_config.vanilla_mbridge:
                require_peers("mbridge")
            # with a mode, verl would put its own replay into Megatron's classes
            engine_config = replace(engine_config, router_replay=EngineRouterReplayConfig())
        super().__init__(model_config, engine_config, *args, **kwargs)

    def initialize(self) -> None:
        """Build the model as verl does, and prove replay on it.

        Raises:
            AttachError: when the model is not replayable.
        """
        super().initialize()
        if self._replays:
            with self.eval_mode():
                self.routing = MegatronPasses(self)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """The passes of verl over a batch, of which each micro-batch was replayed.

        Raises:
            ReplayError: when one was not.
        """
        run = partial(super().forward_backward_batch, data, loss_function, forward_only)
        if self.routing is None:
            return run()
        self._updates = not forward_only
        with self.routing.batch(data, update=not forward_only) as logs:
            outputs = run()
        outputs["metrics"].update({name: [value] for name, value in logs.items()})
        return outputs

    def forward_step(self, batch_iter: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A pass of verl over a micro-batch, with its routes."""
        if self.routing is None:
            return super().forward_step(batch_iter, model, *args, **kwargs)

        def step(batches: Any, model: Any) -> Any:
            return super(MegatronRoutingReplay, self).forward_step(batches, model, *args, **kwargs)

        return self.routing.step(step, batch_iter, model, update=self._updates)


def register() -> None:
    """Have verl make this engine for the strategy megatron.

    Raises:
        AttachError: when this release of verl has no longer what replay stands on, or another engine took its place.
    """
    require_api("verl", verl, MegatronEngineWithLMHead, METHODS, config=McoreEngineConfig, fields=FIELDS)
    if not hasattr(transformer_impl, "prepare_micro_batches"):
        raise AttachError("verl's Megatron engine splits batches elsewhere than in prepare_micro_batches")
    engines = getattr(EngineRegistry, "_engines", {}).get("language_model", {}).get("megatron", {})
    found = engines.get(DEVICE)
    if not (isinstance(found, type) and issubclass(found, MegatronEngineWithLMHead)):
        raise AttachError(f"verl registers {found} for the strategy megatron on {DEVICE}; this release is not known")
    if found is MegatronEngineWithLMHead:
        engines[DEVICE] = MegatronRoutingReplay
    elif not issubclass(found, MegatronRoutingReplay):
        raise AttachError(
            f"the engine for megatron on {DEVICE} is {found.__name__}, not verl's own; derive it from "
            "foreroute.trainers.verl.megatron.MegatronRoutingReplay"
        )


register()
watch_vllm_syncs()
