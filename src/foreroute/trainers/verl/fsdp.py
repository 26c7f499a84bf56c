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
from numpy.typing import NDArray

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

import torch.distributed as dist
import verl
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from foreroute.adapters import hf
from foreroute.replay.indexers import warn_of_choices
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.checks import check_first_rollout, refuse, require_overridden
from foreroute.trainers.verl.packed_batch import FIELD, PackedBatch, PackedRoutes
from foreroute.trainers.verl.passes import (
    ROLLOUT_LOG_PROBS,
    EnginePasses,
    ReplayingEngine,
    add_over,
    gather_over,
    scoring,
)
from foreroute.trainers.verl.protocol import routed_experts
from foreroute.trainers.verl.registry import refuse_what_engines_pass_over, replace_engine
from foreroute.trainers.verl.settings import KEY, Replay, fsdp_refusals, replay_of

Step = Callable[..., Any]
"""verl's `forward_step(micro_batch, loss_function, forward_only)`."""


class FSDPRoutingReplay(ReplayingEngine):
    """Routing replay for verl's FSDP engines of language models; put it first among the bases.

        class MyEngine(FSDPRoutingReplay, MyFSDPEngine): ...

    What is replayed stands in `router_replay.mode` of the engine's configuration. An engine that only runs forward is a
    reference, and is left alone.
    """

    # verl's engine defines these
    model_config: Any
    ulysses_parallel_group: Any
    routing: FSDPPasses | None = None

    def initialize(self) -> None:
        """Build the model as verl does, and prove replay on it. Raises `AttachError` or `ConfigError`."""
        replay = replay_of(self.engine_config)
        if replay != "disabled":
            refuse(f"{KEY} is set, and", fsdp_refusals(self.engine_config, self.model_config))
        super().initialize()  # type: ignore[misc]
        if self.model_config.use_fused_kernels:  # of references too, which would fail
            gather_head(model_of(self))
        if replay == "disabled" or self.engine_config.forward_only:
            return
        with self.eval_mode():
            self.routing = FSDPPasses(self, replay)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's passes over a batch, of which each micro-batch is replayed."""
        is_policy = not (self.engine_config.forward_only or self.is_reference)
        if self.routing is None and is_policy and data.get(FIELD, None) is not None:
            # routes of the rollout are at hand, and no replay was asked for: the mismatch is measured
            self.routing = FSDPPasses(self, "disabled")
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's pass over a micro-batch, with its routes and on its sets."""
        step = super().forward_step  # type: ignore[misc]
        rows_of = partial(_rows_here, self.ulysses_parallel_group)
        with scoring(self, transformer_impl, "logprobs_from_logits", micro_batch, rows_of):
            if self.routing is None or self.is_reference:
                return step(micro_batch, loss_function, forward_only)
            return self.routing.step(step, micro_batch, loss_function)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Leave the reference pass alone, where the reference is the policy without its adapters."""
        with super().disable_adapter():  # type: ignore[misc]
            self.is_reference = True
            try:
                yield
            finally:
                self.is_reference = False


class RoutingReplayEngine(FSDPRoutingReplay, FSDPEngineWithLMHead):
    """verl's FSDP engine of language models with routing replay."""


class FSDPPasses(EnginePasses):
    """The passes of one FSDP engine, each micro-batch of which has a session of its own."""

    def __init__(self, engine: Any, replay: Replay) -> None:
        model = model_of(engine)
        # verl's fused forward returns log-probs, and those in a dictionary alone
        with patch.object(model, "forward", partial(model.forward, return_dict=True)):
            routed = hf.attach(engine.module)
        if replay != "disabled" and routed.indexers is not None:
            warn_of_choices("verl has no field for their choices", "TRL and foreroute train replay both")
        self._group = engine.ulysses_parallel_group  # of the ranks that share packed rows, or None
        groups = () if self._group is None else (self._group,)
        super().__init__(engine, routed, replay, sharing_groups=groups, sum_rows=partial(add_over, groups))
        self._rank = 0 if self._group is None else dist.get_rank(self._group)

    def step(self, step: Step, micro_batch: Any, loss_function: Any) -> Any:
        """Run a `forward_step` of verl on a micro-batch, replayed, recorded and compared as its pass asks for."""
        self.num_forwards += 1
        replays = self._has_routes and self._replay != "disabled"
        # the host looks at a rollout once, in the pass that is compared; afterwards the device checks what it is given
        routes = self.decode(micro_batch) if self._has_routes and self._is_compared else None
        there = micro_batch.to(get_device_id())  # as verl does next: the field goes up once, for verl and for us
        run = partial(step, there, loss_function, not self._is_update)
        compares = self._is_compared and ROLLOUT_LOG_PROBS in there.keys()  # noqa: SIM118
        packed = PackedBatch(there) if replays or compares or routes is not None else None
        if packed is not None and (replays or routes is not None):
            if replays and routes is not None:
                self.routed.rows(routes)  # refuses what a model of this kind cannot replay
                if not self.first_rollout_checked:
                    forward, join = partial(step, there, None, True), partial(self._join_ranks, there)
                    check_first_rollout(self.routed, routes, forward, sequences_of=join)
                    self.first_rollout_checked = True
            refuse, tables = partial(self.decode, micro_batch), self.routed.lookup_tables
            field = PackedRoutes(packed, self.routed.spec, refuse, rank=self._rank, tables=tables)
            with ExitStack() as opened:
                opened.enter_context(
                    self.routed.replay(field) if replays else self.metrics.comparing(self.routed, field)
                )
                if replays and routes is not None and self._sentinel is not None and not self._is_update:
                    opened.enter_context(self._sentinel.counting(routes.lengths))
                loss, output = run()
        elif self._replay == "R2" and not self._is_update:
            with self.routed.record() as recording:
                loss, output = run()
            # put among the outputs, for updates to replay
            executed, layers = recording.trace(), self.routed.model.config.get_text_config().num_hidden_layers
            output["model_output"][FIELD] = routed_experts(
                self._join_ranks(there, executed), there, num_hidden_layers=layers
            )
        else:
            loss, output = run()
        if compares and packed is not None:
            self.compare_log_probs(packed, micro_batch, output["model_output"].get("log_probs"))
        return loss, output

    def _join_ranks(self, micro_batch: Any, recorded: RoutingTrace) -> RoutingTrace:
        """Make the sequences of a micro-batch of what ranks recorded of its packed rows, without verl's padding."""
        parts = [recorded]
        if self._group is not None:
            parts = gather_over(self._group, recorded)
        lengths = micro_batch["input_ids"].offsets().diff().cpu().numpy()
        return concatenate(parts).take_rows(np.arange(lengths.sum()), lengths)


def _rows_here(group: Any, labels: Tensor) -> NDArray[np.integer]:
    """Find the row of the batch of each label of this rank, of which ranks of Ulysses have equal parts."""
    rank = 0 if group is None else dist.get_rank(group)
    return np.arange(rank * len(labels), (rank + 1) * len(labels))


def model_of(engine: Any) -> PreTrainedModel:
    """Find the model of transformers in that of an engine, which PEFT and FSDP1 wrap."""
    return next(module for module in engine.module.modules() if isinstance(module, PreTrainedModel))


def gather_head(model: PreTrainedModel) -> None:
    """Gather the output head in forwards and backwards of a fused model, which reads its weights and never runs it.

    FSDP2 gathers a module where that runs. It reduces the head's gradient, and frees it, at the end of the backward.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, FSDPModule):  # it is tied to the embedding, or under FSDP1: gathered with the whole model
        return

    def release(model: Any, args: Any, output: Any) -> None:
        head.reshard()
        for each in output.values() if isinstance(output, dict) else ():  # None of a forward that failed
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: head.unshard())

    model.register_forward_pre_hook(lambda *_: head.unshard())
    model.register_forward_hook(release, always_call=True)


def register() -> None:
    """Have verl make this engine for the strategies fsdp and fsdp2, and refuse replay where an engine has none."""
    require_overridden("verl", verl.__version__, FSDPRoutingReplay, FSDPEngineWithLMHead)
    for strategy in ("fsdp", "fsdp2"):
        replace_engine(RoutingReplayEngine, FSDPEngineWithLMHead, strategy)
    refuse_what_engines_pass_over()


register()
