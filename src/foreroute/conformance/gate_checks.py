"""Only the selection is replayed: weights and gradients stay the family's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import Case, Unsupported
from foreroute.conformance.check import Blocked, Broken, Check, Situation, misplaced, require
from foreroute.conformance.route_checks import missing_rows
from foreroute.trace import RoutingTrace

TOLERANCE = 1e-3
"""Relative difference from which a gate or a gradient is wrong and not just rounded."""
STEP = 0.005
"""Length of the step of finite differences, in float32."""


def gate_rule(situation: Situation) -> None:
    """With the model's own experts replayed, gate weights are those of the untouched model."""
    seen, native = situation.native_replay.gates_NLK, situation.native.gates_NLK
    if seen is None or native is None:
        raise Unsupported("the probe does not see gate weights")
    routed = situation.native_trace().valid_N
    off = np.abs(seen - native).max(axis=(0, 2), where=routed[:, None, None], initial=0)
    layer = int(np.argmax(off > TOLERANCE * np.abs(native).max()))
    require(
        off[layer] <= TOLERANCE * np.abs(native).max(),
        f"with the model's own experts, gate weights in {situation.spec.layers[layer]} differ by up to "
        f"{off[layer]:.3g}: they are computed by a rule that is not this family's",
    )


def _native_bits(situation: Situation) -> None:
    only_after("gate-rule", gate_rule, situation)
    only_after("missing-rows", missing_rows, situation)
    seen, native = situation.native_replay, situation.native
    off = float(np.abs(seen.logprobs_R - native.logprobs_R).max())
    require(off == 0, f"replaying the model's own routes moves log-probs by up to {off:.3g}")


def _dense_scores(situation: Situation) -> None:
    situation.require_placement()
    model, handle = situation.pair()
    with handle.replay(situation.foreign(handle.spec, situation.base)):
        gates = model.forward(situation.base, grad=False).seen.gates_NLK
    if gates is None:
        raise Unsupported("the probe does not see gate weights")
    # Foreign experts are mostly not the router's own, so scores that it zeroed show up as gates of 0.
    dead = (gates == 0).mean(axis=(0, 2))
    layer = int(dead.argmax())
    require(
        dead.max() == 0,
        f"{dead.max():.0%} of the replayed experts have gate weight 0 in {handle.spec.layers[layer]}: the weights are "
        "gathered from scores that were zeroed outside the router's own choice",
    )


def _group_limit(situation: Situation) -> None:
    groups = situation.adapter.groups
    if groups is None:
        raise Unsupported("the router has no group limit")
    situation.require_placement()
    size = situation.spec.num_experts // groups.count
    top_k = min(groups.live + 2, groups.live * size)
    if top_k <= groups.live:
        raise Unsupported(f"{groups.live} groups of {size} experts leave no choice to exceed the limit")
    case = Case(top_k=top_k)
    model, handle = situation.pair(case)
    wanted = situation.foreign(handle.spec, situation.base)
    with handle.replay(wanted):
        seen = model.forward(situation.base, grad=False).seen
    native = situation.untouched(case).forward(situation.base, grad=False).seen
    found = misplaced(wanted, seen.ids_NLK, native.ids_NLK)
    require(found is None, f"routes over more than {groups.live} groups: {found.sentence}" if found else "")


def router_gradient(situation: Situation) -> None:
    """Under the model's own routes gradients are its own, and under others those of routers are those of the loss."""
    only_after("gate-rule", gate_rule, situation)
    untouched = situation.untouched()
    untouched.forward(situation.base).backward()
    model, handle = situation.pair()
    with handle.replay(situation.native_trace()):
        model.forward(situation.base).backward()
    name, off = furthest(untouched.gradients(), model.gradients())
    require(off <= TOLERANCE, f"under the model's own routes the gradient of {name} is off by {off:.2g} of its size")
    only_after("dense-scores", _dense_scores, situation)
    finite_differences(situation, situation.foreign(situation.spec, situation.base))


def finite_differences(situation: Situation, trace: RoutingTrace) -> None:
    """Raise `Broken` unless the gradient of each router is that of the loss under the trace."""
    model, handle = situation.pair()

    def loss() -> float:
        with handle.replay(trace):
            return model.forward(situation.base, grad=False).seen.loss

    with handle.replay(trace):
        model.forward(situation.base).backward()
    gradients = model.gradients()
    for name in model.router_weights:
        gradient = np.asarray(gradients.get(name, np.zeros(1)), np.float64)
        size = float(np.linalg.norm(gradient))
        require(size > 0, f"the gradient of {name} is zero under the trace: the router is detached")
        step = STEP * gradient / size
        model.add_to(name, step)
        above = loss()
        model.add_to(name, -2 * step)
        below = loss()
        model.add_to(name, step)
        slope = (above - below) / (2 * STEP)
        # A tenth for the curvature of the loss, and 2e-4 for the rounding of a float32 loss over twice the step.
        require(
            abs(slope - size) <= 0.1 * size + 2e-4,
            f"the gradient of {name} has size {size:.3g}, finite differences of the loss say {slope:.3g}",
        )


def only_after(check: str, run: Callable[[Situation], object], situation: Situation) -> None:
    """Raise `Blocked` when another check fails, whose mistake would be seen a second time."""
    try:
        run(situation)
    except Broken:
        raise Blocked(check) from None
    except Unsupported:
        situation.require_placement()


def furthest(expected: Mapping[str, NDArray[Any]], seen: Mapping[str, NDArray[Any]]) -> tuple[str, float]:
    """The parameter whose gradient is furthest off, relative to the largest gradient of its own."""
    off = {
        name: float(np.abs(seen[name] - value).max() / max(float(np.abs(value).max()), 1e-12)) if name in seen else 1.0
        for name, value in expected.items()
    }
    worst = max(off, key=lambda name: off[name])
    return worst, off[worst]


CHECKS = (
    Check(
        "gate-rule",
        "Gate weights follow the family's own rule",
        "Replays the model's own routes and compares the weights of the experts with the untouched model's.",
        gate_rule,
        quick=True,
    ),
    Check(
        "native-bit-equal",
        "Replaying a model's own routes changes no bit",
        "Compares log-probs of the untouched model with those under its own routes.",
        _native_bits,
        quick=True,
    ),
    Check(
        "dense-scores",
        "A replayed expert that the router would not pick keeps its weight",
        "Replays random routes and looks for gate weights of exactly zero.",
        _dense_scores,
        quick=True,
    ),
    Check(
        "group-limit",
        "The final selection is replaced, not limited to the router's own groups",
        "Replays routes that span more groups than the router allows.",
        _group_limit,
    ),
    Check(
        "router-gradient",
        "Routers get the gradient of the loss under the replayed routes",
        "Compares all gradients under native routes with the untouched model, and those of routers under random "
        "routes with finite differences.",
        router_gradient,
    ),
)
