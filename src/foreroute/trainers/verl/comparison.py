"""What verl's engines are measured by: what was executed, and what came out of it, beside the rollout's.

In the old-log-prob pass under R3 both sides have the same tokens, experts and, if the last sync went well, weights.
What is left of k3 is their precisions. Weights that arrived nowhere, or in wrong places, are far above that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import EngineError
from foreroute.trace import NO_VERSION, RoutingTrace
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.verl.protocol import of_responses, parts_of, response_lengths, sampled_mask, versions_of

ROLLOUT_LOG_PROBS = "rollout_log_probs"
K3_LIMIT = 0.1
"""k3, in nats, above which two sides do not hold the same weights. Runs of verl with vLLM were at 4e-4 in bfloat16,
and at 0.5 where a sync had put experts' weights in wrong places."""
MOST_OF_A_TOKEN = 1.0
"""What a token adds at most: a few tokens far apart, as precisions leave behind, must not end a run."""

Sums = dict[int, tuple[float, int]]
"""k3 and its number of tokens, by the version of the weights that sampled them, the oldest of a sequence."""


class RolloutComparison:
    """Sums over the micro-batches of one engine, in the batches that measure.

    From the second mini-batch of an update on, weights differ from those of the rollout: where there is an old-log-prob
    pass, it is measured, and updates are not.

    Args:
        group: gives the data-parallel ranks.
        judges_weights: whether both sides take the same routes, so that what is left tells of their weights.

    Attributes:
        metrics: mismatch that is not logged yet.
    """

    def __init__(self, group: Callable[[], Any], *, judges_weights: bool) -> None:
        self.metrics = MismatchSums()
        self._group = group
        self._weights_check = WeightsCheck() if judges_weights else None
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
            self.metrics.share(lambda sums: over_ranks(sums, self._group()))
            logs.update(self.metrics.flush())
        elif self._weights_check is not None:
            self._weights_check.judge(self._of_ranks)

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
        sides: Any = parts_of(sampled, lengths), of_responses(log_probs, lengths), sampled_mask(micro_batch)
        oldest_S = versions_of(micro_batch)[0]
        for version in np.unique(oldest_S).tolist():
            theirs, ours, counted = ([side[s] for s in np.flatnonzero(oldest_S == version)] for side in sides)
            log_r = self.metrics.compare_tokens(theirs, ours, counted)
            if self._weights_check is not None and not update:
                self._weights_check.add(log_r, version)

    def _of_ranks(self, mine: Sums) -> list[Sums]:
        every = [mine] * dist.get_world_size(self._group())
        dist.all_gather_object(every, mine, group=self._group())
        return every


def over_ranks(sums: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group of verl, on their device."""
    from verl.utils.device import get_device_id  # all else here needs no verl

    on_device = sums.to(get_device_id())
    dist.all_reduce(on_device, group=group)
    return on_device


class WeightsCheck:
    """The mean k3 of sampled tokens, each at most `MOST_OF_A_TOKEN`, judged once for each rollout.

    Where rollouts go on while the trainer trains, tokens of older weights may be far from it: they are stale. Those of
    the newest weights are then judged by themselves.
    """

    def __init__(self) -> None:
        self._sums: Sums = {}

    def add(self, log_r_C: NDArray[np.float64], version: int = NO_VERSION) -> None:
        """Sampled tokens, by their log-probs of the trainer less those of the rollout, float64 [C], and its weights."""
        k3, tokens = self._sums.get(version, (0.0, 0))
        added = float(np.minimum(np.expm1(log_r_C) - log_r_C, MOST_OF_A_TOKEN).sum())
        self._sums[version] = k3 + added, tokens + len(log_r_C)

    def judge(self, gather: Callable[[Sums], list[Sums]]) -> None:
        """Judge the tokens of all processes since the last call. A collective: every process calls it.

        Args:
            gather: the sums of this process in, those of all processes out.

        Raises:
            EngineError: when their mean k3 is above the limit, and that of the newest weights is.
        """
        mine, self._sums = self._sums, {}
        every = [(version, *sums) for each in gather(mine) for version, sums in each.items() if sums[1]]
        newest = max((version for version, _, _ in every), default=NO_VERSION)
        for part in (every, [each for each in every if each[0] == newest]):
            k3, tokens = (sum(each[column] for each in part) for column in (1, 2))
            if k3 <= K3_LIMIT * tokens:
                return
        raise EngineError(
            f"the rollout's log-probs are {k3 / tokens:.3g} nats (k3) from the trainer's on the same experts; expected "
            f"at most {K3_LIMIT} in any precision. Weights did not arrive in the rollout engine at the last sync, or "
            "it samples from another distribution than it reports (temperature, top_p, top_k). Compare its log-probs "
            "of a fixed text with those of a checkpoint"
        )
