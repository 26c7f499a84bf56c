"""Records of a run: figures of its steps, and whether it collapsed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WINDOW = 10
COLLAPSED = 0.5
"""Share of its highest average below which a run's reward has collapsed."""
BINS = 12


def collapse_step(rewards: Sequence[float]) -> int | None:
    """The step at which the rule says that a run has collapsed, or None.

    The rule was fixed before any run, and stands here because `foreroute.records` may mend its alarm: the moving
    average of the reward over `WINDOW` steps is below half of its highest value so far, for `WINDOW` steps that follow
    each other. The step is the last of these. (A loss that is not finite collapses a run too; it ends there.)
    """
    if len(rewards) < WINDOW:
        return None
    averages = sliding_window_view(np.asarray(rewards, np.float64), WINDOW).mean(axis=-1)
    is_low = averages < COLLAPSED * np.maximum.accumulate(averages)
    in_a_row = 0
    for place, low in enumerate(is_low):
        in_a_row = in_a_row + 1 if low else 0
        if in_a_row == WINDOW:
            return place + WINDOW - 1
    return None


def stale_shares(records: Sequence[dict[str, Any]]) -> list[float]:
    """For each mini-batch, share of (token, layer) whose live choice is not the replayed one, over the watched steps.

    Empty where nothing is replayed. Steps whose rollout filled fewer mini-batches are left out.
    """
    watched = [record["live_agreement"] for record in records if "live_agreement" in record]
    most = max((len(agreement) for agreement in watched), default=0)
    # a mean over mini-batches of unequal number would compare different optimizer steps
    full = [agreement for agreement in watched if len(agreement) == most]
    return [float(f"{1 - share:.4g}") for share in np.mean(full, axis=0)] if full else []


def binned(values: Sequence[float], bins: int = BINS) -> list[float]:
    """Means of `bins` equal stretches, of 4 significant digits."""
    parts = np.array_split(np.asarray(values, np.float64), min(bins, len(values)) or 1)
    return [float(f"{part.mean():.4g}") for part in parts if len(part)]


def reduced(records: Sequence[dict[str, Any]], trained_with: str) -> dict[str, Any]:
    """The figures of a run from its lines of metrics.jsonl, with the mismatch of the pass that it trained with."""
    trained = [record["mismatch"][trained_with] for record in records]
    columns = {
        "k3": [each["k3"] for each in trained],
        "f2": [each["f2"] for each in trained],
        "f1.5": [each["f1.5"] for each in trained],
        "grad_norm": [record["grad_norm"] for record in records],
        "entropy": [record["entropy"] for record in records],
        "clip_share": [record["clip_share"] for record in records],
        "effective_share": [record["importance"]["effective_share"] for record in records],
    }
    rewards = np.array([record["reward_mean"] for record in records])
    native = [record["mismatch"]["native"] for record in records if "native" in record["mismatch"]]
    return {
        "steps": len(records),
        "reward": [round(value, 4) for value in rewards.tolist()],
        "reward_last": _mean(rewards[-WINDOW:]),
        "reward_mean": _mean(rewards),
        "collapsed_at": collapse_step(rewards.tolist()),
        "spikes": _mean([norm > 10 for norm in columns["grad_norm"]]),
        "differing_share": _mean([each["differing_share"] for each in native]),
        "stale_share_by_mini_step": stale_shares(records),
        "mean": {name: float(f"{_mean(values):.5g}") for name, values in columns.items()},
        "binned": {name: binned(values) for name, values in columns.items()},
    }


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """NaN without values: of a run whose first step diverged."""
    return float(np.mean(values)) if len(values) else math.nan
