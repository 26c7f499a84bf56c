"""Mismatch of trainer and rollout, as sums until a trainer logs: ratios of sums are right over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.passes import Interceptor, Pass, RecordOptions, is_in
from foreroute.errors import BatchMismatchError, InputError, ReplayError
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.replay import Policy, ReplayCounts, ReplayRows, RoutedModel, Routes

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
UNLIKE = "unlike"
"""Number of forwards that were compared with routes that are not of their tokens."""
SUMS = (*dict.fromkeys(name for ratio in METRICS.values() for name in ratio), *IMPOSSIBLE, UNLIKE)
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
        self._replayed: dict[tuple[bool, bool], ReplayCounts] = {}  # by whether it is compared, and is of updates

    def at_rollout_weights(self, *, update: bool) -> bool:
        """Say whether a pass is compared with the rollout."""
        # from its second mini-batch on, an update has other weights; the pass before it has the rollout's
        return not (update and self.has_old_pass)

    def counting(self, routed: RoutedModel, *, update: bool) -> AbstractContextManager[None]:
        """Count on the device what is replayed while the context is open."""
        is_compared = self._replays_rollout and self.at_rollout_weights(update=update)
        return routed.listening(self._replayed.setdefault((is_compared, update), ReplayCounts()))

    def comparing(self, routed: RoutedModel, routes: Routes) -> AbstractContextManager[None]:
        """Compare passes that are not replayed with routes of the rollout on the device while the context is open."""
        return routed.listening(_NativeComparison(routes, self._add))

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

    def reduce_routes(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of routes over ranks that share rows or layers of a batch, and its tokens. A collective call.

        `reduce` adds float64 [...] up over these ranks, on any device; that of `flush` over all processes.
        """
        self._add_replayed()
        self._sums |= dict(zip(OF_ROUTES, reduce(self._stacked(OF_ROUTES)).unbind(), strict=True))

    def flush(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Read what is to be logged, by name, and start anew. The host waits once. A collective call.

        Raises on every process alike: `InputError` for log-probs of tokens that count which are none, and `ReplayError`
        where a pass was compared with routes of other tokens.
        """
        self._add_replayed()
        sums = dict(zip(SUMS, reduce(self._stacked(SUMS)).tolist(), strict=True))
        self._sums = {}
        if sums[UNLIKE]:
            raise ReplayError(
                f"{int(sums[UNLIKE])} forwards ran on other tokens than the routes of the rollout are of, so that "
                "nothing can be compared; hand the trainer's batches on as they are"
            )
        for name, side in IMPOSSIBLE.items():
            if sums[name]:
                raise InputError(
                    f"log-probs of {side} hold {int(sums[name])} numbers, of {int(sums['tokens'])} sampled tokens, "
                    f"that are not finite or above {MOST_LOGPROB}; expected finite numbers up to 0, the natural "
                    "logarithms of the probabilities of sampled tokens. Have the engine return NaN where it has "
                    "none"
                )
        return {name: sums[above] / sums[below] for name, (above, below) in METRICS.items() if sums[below]}

    def _add_replayed(self) -> None:
        for (is_compared, is_update), counts in self._replayed.items():
            by_name = counts.sums
            native_differing = by_name.pop("native_differing_decisions", 0.0)
            if is_update and by_name:
                self._add(native_decisions=by_name["decisions"], native_differing_decisions=native_differing)
            if is_compared:
                self._add(**by_name)
        self._replayed.clear()

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


class _NativeComparison(Interceptor):
    """Compares what passes pick natively with routes that they are not given, on the device."""

    options = RecordOptions(native=True)

    def __init__(self, routes: Routes, add: Callable[..., None]) -> None:
        self._routes, self._add = routes, add
        self._rows: ReplayRows | None = None
        self._checks = _CountedChecks(add)

    def begin_pass(self, chunk: int, args: Any) -> None:
        """Find the routes of the batch, and force none."""
        try:
            policy = Policy("native", "native", "native", telemetry=False)
            self._rows = self._routes.of_pass(chunk, args, policy, self._checks)
        except (BatchMismatchError, ReplayError):  # a pass that is only measured goes on
            self._rows = None
            self._add(**{UNLIKE: 1.0})

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add the pass."""
        if current is None or self._rows is None:
            return
        ids_LRK = self._rows.ids_LRK
        known_LR = (ids_LRK[..., 0] >= 0) & self._rows.real_R
        differs_LR = ~is_in(current.native_LRK, ids_LRK).all(-1) & known_LR
        self._add(
            rows=known_LR.any(0).sum(),
            differing_rows=differs_LR.any(0).sum(),
            decisions=known_LR.sum(),
            differing_decisions=differs_LR.sum(),
        )


class _CountedChecks(DeferredChecks):
    """Checks that are counted among the sums: before an optimizer's step nobody waits for what is only measured."""

    def __init__(self, add: Callable[..., None]) -> None:
        super().__init__()
        self._add = add

    def add(self, wrong: Tensor, raise_error: Callable[[], object]) -> None:
        """Count what is wrong."""
        self._add(**{UNLIKE: wrong})


def _is_impossible(logprobs: Tensor) -> Tensor:
    return ~(logprobs.isfinite() & (logprobs <= MOST_LOGPROB))
