"""Mismatch of trainer and rollout, as sums until a trainer logs: ratios of sums are right over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from foreroute.errors import InputError
from foreroute.mismatch import routing_mismatch
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.replay import ReplayCounts, RoutedModel
from foreroute.trace import RoutingTrace

METRICS = {
    # what is logged: the two sums that it is the ratio of
    "mismatch/k3": ("k3", "tokens"),
    "mismatch/f2": ("above_2", "tokens"),
    "mismatch/disagreement": ("differing_decisions", "decisions"),
    "mismatch/disagreement_tokens": ("differing_rows", "rows"),
    "mismatch/native_disagreement": ("native_differing_decisions", "native_decisions"),
}
"""Logged beside a trainer's own, where there was something to compare.

- k3: mean of r - 1 - log r over sampled tokens, r the ratio of the trainer's to the rollout's probability; in nats.
- f2: share of sampled tokens with max(r, 1 / r) > 2.
- disagreement: share of (token, layer) that the trainer computed by other experts than the rollout.
- disagreement_tokens: share of tokens with at least one such layer.
- native_disagreement: share of (token, layer) in update passes whose router, left alone, would not pick the replayed
  experts.
"""
IMPOSSIBLE = {"impossible_sampled": "the rollout", "impossible_trained": "the trainer"}
SUMS = (*dict.fromkeys(name for ratio in METRICS.values() for name in ratio), *IMPOSSIBLE)
"""The names of all sums: what is added under another one would be logged nowhere."""
OF_ROUTES = tuple(name for name in SUMS if name not in {"k3", "above_2", "tokens", *IMPOSSIBLE})


class MismatchSums:
    """Sums of this process that are not logged yet, on the device of what is added. Nothing waits before `flush`.

    Where routes of the rollout itself are replayed (`replays_rollout`), experts are compared with its experts.
    """

    def __init__(self, *, replays_rollout: bool = True) -> None:
        self.has_old_pass = False  # whether a pass without gradients was, or is, the first of a rollout
        self._replays_rollout = replays_rollout
        self._sums: dict[str, Tensor | float] = {}

    def at_rollout_weights(self, *, update: bool) -> bool:
        """Say whether a pass is compared with the rollout."""
        # from its second mini-batch on, an update has other weights; the pass before it has the rollout's
        return not (update and self.has_old_pass)

    @contextmanager
    def counting(self, routed: RoutedModel, *, update: bool) -> Iterator[None]:
        """Count on the device what is replayed while the context is open, and add it."""
        counts = ReplayCounts()
        with routed.listening(counts):
            yield
        executed = self._replays_rollout and self.at_rollout_weights(update=update)
        self.add_counts(counts, executed=executed, native=update)

    def compare_tokens(self, sampled: Tensor, trained: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Add the rollout's log-probs of tokens, NaN where not known, and the trainer's, compared in float64.

        Returns the trainer's less the rollout's, float64 [...], 0 for tokens that do not count; and bool [...], those
        that count and are known.
        """
        counted = counted & ~sampled.isnan()
        # what does not count may be padding of any value
        by_rollout, by_trainer = (side.detach().double().masked_fill(~counted, 0.0) for side in (sampled, trained))
        log_r = by_trainer - by_rollout
        self._add(
            tokens=counted.sum(),
            k3=(log_r.expm1() - log_r).sum(),
            above_2=(log_r.abs() > math.log(2.0)).sum(),
            impossible_sampled=_is_impossible(by_rollout).sum(),
            impossible_trained=_is_impossible(by_trainer).sum(),
        )
        return log_r, counted

    def add_counts(self, counts: ReplayCounts, *, executed: bool, native: bool) -> None:
        """Add what a listener counted beside a replay of the rollout's routes, in passes that nobody added before.

        Args:
            counts: of these passes.
            executed: whether the weights were still the rollout's, so that experts are compared with its experts.
            native: whether it was an update, so that it counts what its routers would have picked.
        """
        by_name = counts.sums
        if not by_name:
            return
        native_differing = by_name.pop("native_differing_decisions")
        if native:
            self._add(native_decisions=by_name["decisions"], native_differing_decisions=native_differing)
        if executed:
            self._add(**by_name)

    def compare_routes(self, rollout: RoutingTrace, executed: RoutingTrace) -> None:
        """Add routes of the rollout beside recorded ones, whose sequences may end earlier."""
        routes = routing_mismatch(rollout.truncated(executed.lengths), executed)
        self._add(
            rows=routes.rows,
            differing_rows=int(routes.by_differing_layers[1:].sum()),
            decisions=routes.rows * len(routes.differing_L),
            differing_decisions=int(routes.differing_L.sum()),
        )

    def reduce_routes(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of routes over ranks that share rows or layers of a batch, and its tokens. A collective call.

        `reduce` adds float64 [...] up over these ranks, on any device; that of `flush` over all processes.
        """
        self._sums |= dict(zip(OF_ROUTES, reduce(self._stacked(OF_ROUTES)).unbind(), strict=True))

    def flush(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Read what is to be logged, by name, and start anew. The host waits once. A collective call.

        Raises `InputError` on every process alike, for log-probs of tokens that count which are none.
        """
        sums = dict(zip(SUMS, reduce(self._stacked(SUMS)).tolist(), strict=True))
        self._sums = {}
        for name, side in IMPOSSIBLE.items():
            if sums[name]:
                raise InputError(
                    f"log-probs of {side} hold {int(sums[name])} numbers, of {int(sums['tokens'])} sampled tokens, "
                    f"that are not finite or above {MOST_LOGPROB}; expected finite numbers up to 0, the natural "
                    "logarithms of the probabilities of sampled tokens. Have the engine return NaN where it has "
                    "none"
                )
        return {name: sums[above] / sums[below] for name, (above, below) in METRICS.items() if sums[below]}

    def _stacked(self, names: tuple[str, ...]) -> Tensor:
        device = next((each.device for each in self._sums.values() if isinstance(each, Tensor)), None)
        # filled there, as a number of the host would be copied to the device for each
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([nothing + self._sums.get(name, 0.0) for name in names])

    def _add(self, **values: Tensor | float) -> None:
        if unknown := sorted(values.keys() - set(SUMS)):
            raise InputError(f"no metric is made of {', '.join(unknown)}; expected some of {', '.join(SUMS)}")
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value


def _is_impossible(logprobs: Tensor) -> Tensor:
    return ~(logprobs.isfinite() & (logprobs <= MOST_LOGPROB))
