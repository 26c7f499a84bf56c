"""Common part of verl's engines: batches of micro-batches, each replayed, compared with the rollout, and counted.

A step of verl is: the rollout, whose routes travel in the batch; the old-log-prob pass, in which the weights are still
those of the rollout (left out in bypass mode); the reference pass, on an engine of its own or with adapters switched
off; then, for each mini-batch, update passes over micro-batches, and a step of the optimizer. From the first forward of
an update to that step the host reads nothing from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import CaptureError, ReplayError
from foreroute.replay import RoutedModel
from foreroute.replay.rows import to_device
from foreroute.trace import RoutingTrace
from foreroute.trainers.checks import judge_together
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.plans import PlannedPasses
from foreroute.trainers.sentinel import RolloutSentinel
from foreroute.trainers.verl.packed_batch import FIELD, PackedBatch, require_routed
from foreroute.trainers.verl.protocol import trace_of, versions_of
from foreroute.trainers.verl.settings import MASKS, Replay, libraries_of
from foreroute.trainers.weights_check import WeightsCheck

ROLLOUT_LOG_PROBS = "rollout_log_probs"
Value = TypeVar("Value")


class ReplayingEngine:
    """Base class of verl's engines before its own: its passes over a batch, with replay around them."""

    # verl's engine defines these; a mixin only sees them at run time
    engine_config: Any
    eval_mode: Any
    replays_routes = True  # what verl's registry is searched for
    routing: EnginePasses | None = None
    is_reference = False  # whether the adapters of the policy are switched off now
    _in_training_step = False

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """Run verl's training step, and put mismatch and plans among its metrics when the optimizer has stepped."""
        train = super().train_batch  # type: ignore[misc]
        if self.routing is None:
            return train(data, loss_function)
        self._in_training_step = True
        try:
            outputs = train(data, loss_function)
        finally:
            self._in_training_step = False
        self.routing.log(outputs)
        return outputs

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Run verl's passes over a batch, of which each micro-batch is replayed."""
        run = super().forward_backward_batch  # type: ignore[misc]
        if self.routing is None or self.is_reference:
            return run(data, loss_function, forward_only)
        with self.routing.batch(data, update=not forward_only):
            outputs = run(data, loss_function, forward_only)
        if not (forward_only or self._in_training_step):  # some workers of verl step later, by a call of their own
            self.routing.log(outputs)
        return outputs


class EnginePasses:
    """The passes of one engine of verl, as it is initialised."""

    def __init__(
        self,
        engine: Any,
        routed: RoutedModel,
        replay: Replay,
        *,
        sharing_groups: tuple[Any, ...] = (),  # of ranks that share rows or layers of a batch
        sum_rows: Callable[[Tensor], Tensor] | None = None,  # over these, where the model does not know them
    ) -> None:
        self.routed: Any = routed
        self.metrics = MismatchSums(replays_rollout=replay == "R3")
        self.first_rollout_checked = replay != "R3"
        self._engine, self._replay, self._sharing_groups = engine, replay, sharing_groups
        # under R3 both sides take the same routes, so that what is left tells of their weights
        self._weights_check = WeightsCheck() if replay == "R3" else None
        self._sentinel: RolloutSentinel | None = None
        if replay == "R3":
            # ranks that share a batch find the same, and one of them says so
            says = all(dist.get_rank(group) == 0 for group in sharing_groups)
            self._sentinel = RolloutSentinel(routed, sum_rows, says=says)
        self._suspected = 0  # by it since the last log
        self._planned: PlannedPasses | None = None
        self._checks = DeferredChecks()
        # of the batch that runs, the same for all of its micro-batches
        self.num_forwards = 0
        self._is_update = self._is_compared = self._has_routes = False

    @contextmanager
    def batch(self, data: Any, *, update: bool) -> Iterator[None]:
        """Surround a batch of verl, and judge the rollout behind the old-log-prob pass. A collective call."""
        metrics = self.metrics
        metrics.has_old_pass |= not update
        self.num_forwards, self._is_update = 0, update
        self._is_compared = metrics.at_rollout_weights(update=update)
        self._has_routes = self._brings_routes(data)
        if self._sentinel is not None and not update:
            self._sentinel.begin_rollout()
        with nullcontext() if self._replay == "disabled" else metrics.counting(self.routed, update=update):
            yield
        if not self.num_forwards:
            raise ReplayError(
                f"{type(self._engine).__name__} ran a batch of {len(data)} without forward_step, so that nothing was "
                "replayed in it"
            )
        if not update:
            self._on_all(self._checks.wait)
            if self._sentinel is not None:
                self._suspected += len(self._on_all(self._sentinel.judge))
            if self._weights_check is not None:
                gather = partial(gather_over, self._engine.get_data_parallel_group())
                self._on_all(partial(self._weights_check.judge, gather))

    def log(self, outputs: Any) -> None:
        """Put what was summed up among the metrics of verl, which the host waits for. A collective call."""
        # only metrics of updates reach verl's logs, so sums of the old-log-prob pass wait for the update behind it
        if self._sharing_groups:
            self.metrics.reduce_routes(partial(add_over, self._sharing_groups))
        logs = self.metrics.flush(partial(add_over, (self._engine.get_data_parallel_group(),)))
        # without an old-log-prob pass nothing is judged, of which a 0 would say that it was
        if self._sentinel is not None and self.metrics.has_old_pass:
            count = torch.tensor(float(self._suspected))
            logs["sentinel/suspicions"] = float(add_over((self._engine.get_data_parallel_group(),), count))
            self._suspected = 0
        if self._planned is not None:
            logs |= self._planned.flush()
        if "metrics" in outputs:  # of the last stage, which verl asks
            outputs["metrics"].update({name: [value] for name, value in logs.items()})

    def decode(self, micro_batch: Any) -> RoutingTrace:
        """Read routes on the host. Raises whatever is wrong with them."""
        routes = trace_of(micro_batch, model=self.routed.spec)
        if self._replay != "disabled":
            require_routed(routes, micro_batch)
        return routes

    def compare_log_probs(self, packed: PackedBatch, micro_batch: Any, log_probs: Tensor | None) -> None:
        """Compare log-probs, of which an engine gives one for each input position, with the rollout's on the device."""
        if log_probs is None or packed.fields.get(ROLLOUT_LOG_PROBS, None) is None:
            return
        if not log_probs.is_nested or len(log_probs.values()) != len(packed.tokens_N):
            raise CaptureError(
                f"the engine gives log-probs of shape {list(log_probs.shape)} for {len(packed.tokens_N)} tokens; "
                "expected a nested tensor with one for each"
            )
        # the entry of a position is of the token behind it; a first token that was sampled would have none
        trained_N, scored_N = packed.trained_N, log_probs.values().roll(1)
        sampled_N = packed.gather_field(ROLLOUT_LOG_PROBS)
        packed.wrong = packed.wrong | (trained_N & packed.is_first_N).any()
        self._checks.add(packed.wrong, packed.require_true)
        log_r_N, counted_N = self.metrics.compare_tokens(sampled_N, scored_N, trained_N)
        if self._weights_check is None or self._is_update:
            return
        oldest_S = versions_of(micro_batch)[0]
        versions = np.unique(oldest_S).tolist()
        for version in versions:
            is_of_version_N = counted_N
            if len(versions) > 1:
                is_of_version_N = counted_N & to_device(oldest_S == version, counted_N.device)[packed.number_N]
            self._weights_check.add(log_r_N, is_of_version_N, version)

    def _on_all(self, judge: Callable[[], Value]) -> Value:
        """Call `judge_together`."""
        groups = (*self._sharing_groups, self._engine.get_data_parallel_group())
        return judge_together(judge, partial(add_over, groups))

    def _brings_routes(self, data: Any) -> bool:
        """Say whether micro-batches of a batch have routes to replay, or to compare with."""
        has_routes = data.get(FIELD, None) is not None
        if self._replay == "R2" and has_routes != self._is_update:
            if has_routes:
                raise ReplayError(
                    f"router_replay.mode is R2 and the rollout brought {FIELD!r}; set "
                    "rollout.enable_rollout_routing_replay=False, or take R3"
                )
            raise ReplayError(
                f"router_replay.mode is R2, and the update has no {FIELD!r} of an old-log-prob pass: verl ran none, or "
                "did not keep its output"
            )
        return has_routes or self._replay == "R3"


def scores_on_masks(engine: Any) -> bool:
    """Say whether log-probs of an engine are those on the sets that tokens were drawn from."""
    return MASKS in libraries_of(engine.model_config)


def scoring(engine: Any, *args: Any) -> AbstractContextManager[None]:
    """Call `scored_on_sets`, where an engine scores on masks."""
    if not scores_on_masks(engine):
        return nullcontext()
    # importing it has rollouts bring masks, which nobody has asked for elsewhere
    from foreroute.trainers.verl.sampling_masks import scored_on_sets

    return scored_on_sets(*args)


def gather_over(group: Any, mine: Value) -> list[Value]:
    """Give what each rank of a group has. A collective call."""
    every = [mine] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return every


def add_over(groups: tuple[Any, ...], sums: Tensor) -> Tensor:
    """Add sums up over the ranks of groups of verl, one after the other, on their device. A collective call."""
    from verl.utils.device import get_device_id  # all else here needs no verl

    on_device = sums.to(get_device_id(), copy=True)
    for group in groups:
        dist.all_reduce(on_device, group=group)
    return on_device
