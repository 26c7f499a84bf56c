"""Check that a rollout engine has the trainer's weights: by k3 of its tokens on the same experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreroute.errors import EngineError
from foreroute.trace import NO_VERSION

K3_LIMIT = 0.1
"""k3, in nats, above which two sides do not hold the same weights. Runs of verl with vLLM were at 4e-4 in bfloat16,
and at 0.5 where a sync had put experts' weights in wrong places."""
MOST_OF_A_TOKEN = 1.0
"""Per-token cap, so that a few outliers caused by rounding do not abort a run."""

K3Sums = dict[int, tuple[float, float]]
"""k3 and its number of tokens, by the version of the weights that sampled them, the oldest of a sequence."""


class WeightsCheck:
    """Check that a rollout was sampled with the trainer's weights: by the mean k3 of its tokens, once for each rollout.

    In the old-log-prob pass under R3 both sides have the same tokens, experts and, if the last sync went well, weights.
    What is left of k3 is their precisions. Weights that arrived nowhere, or in wrong places, are far above that.

    Where rollouts go on while the trainer trains, tokens of older weights may be far from it: they are stale. Those of
    the newest weights are then judged by themselves.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def add(self, log_r: Tensor, counted: Tensor, version: int = NO_VERSION) -> None:
        """Add tokens that one version of the weights sampled, as `MismatchSums.compare_tokens` returns them."""
        k3 = (log_r.expm1() - log_r).clamp_max(MOST_OF_A_TOKEN)
        added = torch.stack([torch.where(counted, k3, 0.0).sum(), counted.sum()])
        self._sums[version] = self._sums[version] + added if version in self._sums else added

    def judge(self, gather: Callable[[K3Sums], list[K3Sums]]) -> None:
        """Raise `EngineError` when tokens since the last call are too far, and those of the newest weights are.

        The host waits once. `gather` takes the sums of this process and gives those of all: a collective call.
        """
        sums, self._sums = self._sums, {}
        values = torch.stack(list(sums.values())).tolist() if sums else []
        mine = {version: (k3, tokens) for version, (k3, tokens) in zip(sums, values, strict=True)}
        every = [(version, *each) for part in gather(mine) for version, each in part.items() if each[1]]
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
