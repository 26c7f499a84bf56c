"""What verl's engines are measured by: what was executed, and what came out of it, beside the rollout's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils.device import get_device_id

from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.verl.expert_weights import ExpertWeightsCheck
from foreroute.trainers.verl.protocol import of_responses, parts_of, response_lengths, sampled_mask

ROLLOUT_LOG_PROBS = "rollout_log_probs"


class RolloutComparison:
    """Sums over the micro-batches of one engine, in the batches that measure.

    In an update, weights differ from those of the rollout after its first mini-batch: where there is an old-log-prob pass,
    it is measured and updates are not.

    Args:
        spec: of the policy.
        group: gives the data-parallel ranks.
        judges_weights: whether both sides take the same routes, so that what is left tells of their weights.

    Attributes:
        metrics: mismatch that is not logged yet.
    """

    def __init__(self, spec: RoutingSpec, group: Callable[[], Any], *, judges_weights: bool) -> None:
        self.metrics = MismatchSums()
        self._group = group
        self._weights_check = ExpertWeightsCheck(spec) if judges_weights else None
        self._has_old_pass = False

    @contextmanager
    def batch(self, *, update: bool) -> Iterator[dict[str, float]]:
        """Around a `forward_backward_batch` of verl. A collective call of the data-parallel ranks.

        Yields:
            What verl is to log, empty until the context is closed. Only metrics of updates reach verl's logs, so those
            of the old-log-prob pass wait for the update that follows.

        Raises:
            EngineError: when the rollout was not sampled with the trainer's weights, where they are judged. They are
                compared in the old-log-prob pass, before anything is learned from the rollout.
        """
        logs: dict[str, float] = {}
        self._has_old_pass |= not update
        yield logs
        if update:
            self.metrics.share(self._over_ranks)
            logs.update(self.metrics.flush())
        elif self._weights_check is not None:
            self._weights_check.judge(self._over_ranks)

    def measures(self, *, update: bool) -> bool:
        """Whether micro-batches of the open batch are to be recorded and added."""
        return not (update and self._has_old_pass)

    def add(
        self,
        executed: RoutingTrace,
        routes: RoutingTrace | None,
        micro_batch: Any,
        log_probs: Tensor | None,
        *,
        update: bool,
    ) -> None:
        """One micro-batch of S sequences.

        Args:
            executed: the routes that the trainer took.
            routes: those of the rollout, or None.
            micro_batch: verl's, with what was sampled.
            log_probs: S rows, one entry for each input position; None where the engine gave none.
            update: whether weights may differ from those of the rollout.
        """
        if routes is not None:
            self.metrics.compare_routes(routes, executed)
        sampled = micro_batch.get(ROLLOUT_LOG_PROBS, None)
        if log_probs is None or sampled is None:
            return
        lengths = response_lengths(micro_batch)
        trained, counted = of_responses(log_probs, lengths), sampled_mask(micro_batch)
        by_rollout = parts_of(sampled, lengths)
        self.metrics.compare_tokens(by_rollout, _padded(trained), _padded(counted))
        if self._weights_check is not None and not update:
            self._weights_check.add(executed, by_rollout, trained, counted)

    def _over_ranks(self, sums: Tensor) -> Tensor:
        on_device = sums.to(get_device_id())
        dist.all_reduce(on_device, group=self._group())
        return on_device


def _padded(rows: list[Any]) -> Tensor:
    parts = [torch.from_numpy(np.asarray(row, np.float32)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
