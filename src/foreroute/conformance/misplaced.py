"""Naming the mistake when replayed routes did not reach the experts they were meant for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.mismatch import Defect, explain
from foreroute.trace import RoutingTrace

NAMES = ("the trace", "what the experts were given")
_CHECK_OF = {
    Defect.SHIFT: "token-shift",
    Defect.FLATTENING: "sequence-order",
    Defect.PERMUTATION: "sequence-order",
    Defect.LAYER_OFFSET: "layer-axis",
}


@dataclass(frozen=True)
class Misplaced:
    """A mistake of placement.

    Attributes:
        check: id of the check that is about it; "routes-followed" when it has no name.
        sentence: what was seen.
    """

    check: str
    sentence: str


def misplaced(wanted: RoutingTrace, seen_NLK: NDArray[Any], native_NLK: NDArray[Any]) -> Misplaced | None:
    """Compare what the experts were given with what a trace asked for.

    Args:
        wanted: the replayed trace, of N rows.
        seen_NLK: what was executed.
        native_NLK: what the untouched model executes on the same tokens.

    Returns:
        None when every routed row was followed, as a set of experts.
    """
    if seen_NLK.shape != wanted.expert_ids_NLK.shape:
        sentence = f"the probe saw rows of shape {seen_NLK.shape}, the trace has {wanted.expert_ids_NLK.shape}"
        return Misplaced("routes-followed", sentence)
    valid = wanted.valid_N
    seen, asked = np.sort(seen_NLK.astype(np.int64), -1), np.sort(wanted.expert_ids_NLK.astype(np.int64), -1)
    wrong_RL = (seen != asked).any(axis=-1)[valid]
    if not wrong_RL.any():
        return None
    if (seen == np.sort(native_NLK, -1)).all():
        return Misplaced("silent-no-op", "no layer followed the trace, and nothing was raised")
    whole = wrong_RL.mean(axis=0) > 0.6
    with np.errstate(invalid="ignore"):  # what was executed may hold an expert twice, which no trace does
        named = explain(wanted, replace(wanted, expert_ids_NLK=seen_NLK.astype(wanted.spec.id_dtype)), names=NAMES)
    if named.kind in _CHECK_OF:
        return Misplaced(_CHECK_OF[named.kind], named.sentence)
    if whole.any() and not wrong_RL[:, ~whole].any() and not whole.all():
        layers = ", ".join(str(wanted.spec.layers[int(i)]) for i in np.flatnonzero(whole))
        return Misplaced("silent-no-op", f"{layers} did not follow the trace, and nothing was raised")
    return Misplaced("routes-followed", _first(wanted, seen_NLK, wrong_RL))


def _first(wanted: RoutingTrace, seen_NLK: NDArray[Any], wrong_RL: NDArray[np.bool_]) -> str:
    routed = np.flatnonzero(wanted.valid_N)
    at, layer = (int(i) for i in np.argwhere(wrong_RL)[0])
    row = int(routed[at])
    sequence = int(np.searchsorted(wanted.offsets, row, side="right") - 1)
    return (
        f"{int(wrong_RL.sum())} of {wrong_RL.size} routing decisions were not followed; first: sequence "
        f"{sequence}, position {row - int(wanted.offsets[sequence])}, {wanted.spec.layers[layer]} asked for "
        f"{wanted.expert_ids_NLK[row, layer].tolist()} and got {seen_NLK[row, layer].tolist()}"
    )
