"""The rates of a cost model by which it takes as long as steps took: the one finder, for whoever has timed something.

The seconds of a step are the longest of many paths of work, and each path is linear in the inverse rates; so they are
convex in these, and linear in pieces. Least squares in a trust region follow the pieces, with slopes by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

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
STEP = 1e-3
"""Relative change by which slopes are taken: far above rounding, and within one linear piece mostly."""
CONVERGED = 1e-12
"""Relative change of errors and parameters below which the search ends: a few rounds more, and digits to compare."""
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

    found = least_squares(
        errors,
        np.ones(len(names)),
        bounds=(least_K, FARTHEST),
        method="dogbox",  # the other one never reaches a bound, and parameters may vanish
        diff_step=STEP,
        x_scale="jac",
        ftol=CONVERGED,
        xtol=CONVERGED,
        gtol=CONVERGED,
    )
    return Found(scaled(found.x), found.jac * found.x)


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
