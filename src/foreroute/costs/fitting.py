"""The rates of a cost model by which it takes as long as steps took: the one finder, for whoever has timed something.

The seconds of a step are the longest of many paths of work, and each path is linear in the inverse rates; so they are
convex in these, and linear in pieces. Damped least squares follow the pieces, with slopes by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel, Hardware
from foreroute.errors import ConfigError

Floats = NDArray[np.float64]
AS_THEY_ARE = (
    *("layer_s", "replica_s", "replica_backward_s", "node_latency_s", "cluster_latency_s"),
    "backward_products",
)
"""Parameters to which time is proportional. To all others, which are rates, it is inversely so."""
MAY_VANISH = ("replica_s", "replica_backward_s")
"""Parameters that may be found to be 0."""
FARTHEST = 1e3
"""Largest factor: what is found is at most this many times what it was, or one over it."""
STEP = 1e-4
"""Relative change by which slopes are taken: far above rounding, and within one linear piece mostly."""
CONVERGED = 1e-12
"""Relative change of errors and parameters below which the search ends: a few rounds more, and digits to compare."""
MOST_ROUNDS, REACH = 200, 4.0
"""Rounds of the search, and the most that one of them changes a parameter by, as a factor."""
ALIKE = 1e6
"""Singular values of the slopes, largest over smallest, from which parameters cannot be told apart."""


class Found(NamedTuple):
    """A cost model with what was found in it.

    Attributes:
        costs: with the new values.
        share_VK: float64 [V, K], of each measurement, the relative change by a relative change of each parameter.
    """

    costs: CostModel
    share_VK: Floats


def find_rates(
    costs: CostModel,
    names: Sequence[str],
    predicted: Callable[[CostModel], Floats],
    measured_V: Floats,
    size_V: Floats,
) -> Found:
    """Change parameters of hardware until the cost model predicts what was measured.

    Args:
        costs: to begin from; parameters that begin at 0 stay there.
        names: K attributes of `Hardware` and `Links`.
        predicted: float64 [V], what a cost model predicts of each measurement.
        measured_V: seconds.
        size_V: seconds that errors are taken relative to.
    """
    # factors of what is configured, so that all parameters are of one size
    begin_K = np.array([_cost(value_of(costs.hardware, name), name) for name in names])
    least_K = np.array([0.0 if name in MAY_VANISH else 1 / FARTHEST for name in names])

    def scaled(scale_K: Floats) -> CostModel:
        values = {n: _cost(float(c), n) for n, c in zip(names, begin_K * scale_K, strict=True)}
        return with_values(costs, values)

    def errors(scale_K: Floats) -> Floats:
        return (predicted(scaled(scale_K)) - measured_V) / size_V

    scale_K, slopes_VK = _least_squares(errors, np.ones(len(names)), least_K)
    return Found(scaled(scale_K), slopes_VK * scale_K)


def require_distinct_effects(share_VK: Floats, names: Sequence[str]) -> None:
    """Raise `ConfigError` where measurements say nothing about parameters, or cannot tell them apart."""
    largest_K = np.abs(share_VK).max(axis=0)
    if idle := [name for name, share in zip(names, largest_K, strict=True) if share < 1e-9]:
        raise ConfigError(
            f"no measurement depends on {', '.join(idle)}; leave it out, or measure steps in which it takes time"
        )
    values = np.linalg.svd(share_VK / largest_K, compute_uv=False)
    if values[-1] * ALIKE < values[0]:
        raise ConfigError(
            f"the measurements cannot tell {', '.join(names)} apart; measure steps that differ in size and imbalance, "
            "or fit fewer"
        )


def value_of(hardware: Hardware, name: str) -> float:
    """A parameter of hardware or of its links."""
    return float(getattr(hardware if hasattr(hardware, name) else hardware.links, name))


def with_values(costs: CostModel, values: Mapping[str, float]) -> CostModel:
    """The cost model with other parameters of its hardware and links."""
    hardware = costs.hardware
    links = replace(hardware.links, **{name: value for name, value in values.items() if not hasattr(hardware, name)})
    own: dict[str, Any] = {name: value for name, value in values.items() if hasattr(hardware, name)}
    return replace(costs, hardware=replace(hardware, links=links, **own))


def _cost(value: float, name: str) -> float:
    """Turn a parameter into what time is proportional to, and back."""
    return value if name in AS_THEY_ARE else 1 / value


def _least_squares(
    errors: Callable[[Floats], Floats], begin_K: Floats, least_K: Floats
) -> tuple[Floats, NDArray[np.float64]]:
    """Find the factors with the least sum of squared errors, and the slopes there (Levenberg and Marquardt)."""
    scale_K, damping = begin_K, 1e-3
    error_V = errors(scale_K)
    # one-sided: the pieces are linear, and a step across a kink is mended by the next round
    slopes_VK = _slopes(errors, scale_K, error_V)
    for _ in range(MOST_ROUNDS):
        # a factor goes far in several rounds, since slopes do not hold far away; what may vanish vanishes at once
        low_K = np.where(least_K > 0, np.maximum(least_K, scale_K / REACH), 0.0)
        high_K = np.minimum(FARTHEST, np.maximum(scale_K, STEP) * REACH)
        tried_K = scale_K + _move(slopes_VK, error_V, damping, low_K - scale_K, high_K - scale_K)
        tried_V = errors(tried_K)
        before, better = error_V @ error_V, error_V @ error_V - tried_V @ tried_V
        # a step that helps may be longer next time; one that does not is tried shorter
        if better > 0:
            is_still = np.abs(tried_K - scale_K).max() <= CONVERGED * np.abs(tried_K).max()
            scale_K, error_V, damping = tried_K, tried_V, damping / 10
            slopes_VK = _slopes(errors, scale_K, error_V)
            if is_still or better <= CONVERGED * before:
                break
        elif (damping := damping * 10) > 1e12:
            break
    return scale_K, slopes_VK


def _move(slopes_VK: Floats, error_V: Floats, damping: float, low_K: Floats, high_K: Floats) -> Floats:
    """The damped step of least squares within bounds: what would leave them ends there, and the others know of it."""
    gradient_K, curvature_KK = slopes_VK.T @ error_V, slopes_VK.T @ slopes_VK
    curvature_KK = curvature_KK + damping * np.diag(np.diag(curvature_KK))
    move_K, free_K = np.zeros(len(gradient_K)), np.diag(curvature_KK) > 0
    # each round bounds one factor more at least
    while free_K.any():
        known_K = gradient_K + curvature_KK @ np.where(free_K, 0.0, move_K)
        move_K[free_K] = -np.linalg.lstsq(curvature_KK[np.ix_(free_K, free_K)], known_K[free_K])[0]
        is_out_K = free_K & ((move_K < low_K) | (move_K > high_K))
        move_K = np.clip(move_K, low_K, high_K)
        if not is_out_K.any():
            break
        free_K &= ~is_out_K
    return move_K


def _slopes(errors: Callable[[Floats], Floats], scale_K: Floats, error_V: Floats) -> Floats:
    """float64 [V, K], change of each error by each factor."""
    slopes_VK = np.empty((len(error_V), len(scale_K)))
    for k in range(len(scale_K)):
        step_K = np.zeros(len(scale_K))
        step_K[k] = STEP * max(scale_K[k], STEP)  # a parameter that has vanished has slopes too
        if scale_K[k] + step_K[k] > FARTHEST:  # nothing is predicted beyond the bounds, where values may be refused
            step_K[k] *= -1
        slopes_VK[:, k] = (errors(scale_K + step_K) - error_V) / step_K[k]
    return slopes_VK
