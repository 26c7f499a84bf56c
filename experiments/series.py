"""What is kept of a run: figures of its steps, and whether it collapsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 10
BINS = 12


def moving_average(values: NDArray[np.float64], window: int = WINDOW) -> NDArray[np.float64]:
    """float64 [n - window + 1], of each `window` values that follow each other; empty when there are fewer."""
    if len(values) < window:
        return np.zeros(0)
    return np.convolve(values, np.full(window, 1 / window), mode="valid")


def collapse_step(rewards: NDArray[np.float64], window: int = WINDOW) -> int | None:
    """The step at which the rule says that a run has collapsed, or None.

    The rule was fixed before any run: the moving average of the reward is below half of its highest value so far, for
    `window` steps that follow each other. The step is the last of these. (A loss that is not finite collapses a run
    too; it ends there.)
    """
    averages = moving_average(rewards, window)
    low = averages < 0.5 * np.maximum.accumulate(averages) if len(averages) else np.zeros(0, bool)
    in_a_row = 0
    for position, is_low in enumerate(low.tolist()):
        in_a_row = in_a_row + 1 if is_low else 0
        if in_a_row == window:
            return position + window - 1
    return None


def binned(values: Sequence[float], bins: int = BINS) -> list[float]:
    """Means of `bins` equal stretches, of 4 significant digits."""
    parts = np.array_split(np.asarray(values, np.float64), min(bins, len(values)) or 1)
    return [float(f"{part.mean():.4g}") for part in parts if len(part)]


def reduced(records: Sequence[dict[str, Any]], trained_with: str) -> dict[str, Any]:
    """The figures of a run from the records of its steps.

    Args:
        records: lines of metrics.jsonl.
        trained_with: the pass whose mismatch is that of the run: "native" or "replayed".
    """
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
        "reward_last": float(rewards[-WINDOW:].mean()),
        "reward_mean": float(rewards.mean()),
        "collapsed_at": collapse_step(rewards),
        "spikes": float(np.mean(np.array(columns["grad_norm"]) > 10)),
        "differing_share": float(np.mean([each["differing_share"] for each in native])),
        "mean": {name: float(f"{np.mean(values):.5g}") for name, values in columns.items()},
        "binned": {name: binned(values) for name, values in columns.items()},
    }
