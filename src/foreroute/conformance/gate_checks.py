"""Only the selection is replayed: weights and gradients stay the family's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import Case, Unsupported
from foreroute.conformance.check import PLACEMENT, CheckContext, Checks, require, require_foreign_followed
from foreroute.trace import RoutingTrace

TOLERANCE = 1e-3
"""Relative difference from which a gate or a gradient is wrong and not just rounded."""
STEP = 0.005
"""Length of the step of finite differences, in float32."""
CHECKS = Checks()


@CHECKS.add("gate-rule", "Gate weights follow the family's own rule", needs=PLACEMENT, quick=True)
def _gate_rule(context: CheckContext) -> None:
    """Compare gate weights under the model's own experts with those of the untouched model."""
    seen, native = context.native_replay.gates_NLK, context.native.gates_NLK
    if seen is None or native is None:
        raise Unsupported("the probe does not see gate weights")
    routed = context.native_trace().valid_N
    # relative to the largest gate of all, since small ones are rounded more
    off = np.abs(seen - native).max(axis=(0, 2), where=routed[:, None, None], initial=0)
    layer = int(np.argmax(off > TOLERANCE * np.abs(native).max()))
    require(
        off[layer] <= TOLERANCE * np.abs(native).max(),
        f"with the model's own experts, gate weights in {context.spec.layers[layer]} differ by up to "
        f"{off[layer]:.3g}: they are computed by a rule that is not this family's",
    )


@CHECKS.add(
    "native-bit-equal", "Replaying a model's own routes changes no bit", needs=("gate-rule", "missing-rows"), quick=True
)
def _native_bits(context: CheckContext) -> None:
    """Compare log-probs under the model's own routes, bit for bit."""
    seen, native = context.native_replay, context.native
    # the selection is the same, so any difference is something else that was touched
    off = float(np.abs(seen.logprobs_R - native.logprobs_R).max())
    require(off == 0, f"replaying the model's own routes moves log-probs by up to {off:.3g}")


@CHECKS.add(
    "dense-scores", "A replayed expert that the router would not pick keeps its weight", needs=PLACEMENT, quick=True
)
def _dense_scores(context: CheckContext) -> None:
    """Look for gate weights of exactly zero under foreign routes."""
    gates = context.replayed(context.foreign(context.spec, context.base)).gates_NLK
    if gates is None:
        raise Unsupported("the probe does not see gate weights")
    # Foreign experts are mostly not the router's own, so scores that it zeroed show up as gates of 0.
    dead = (gates == 0).mean(axis=(0, 2))
    layer = int(dead.argmax())
    require(
        dead.max() == 0,
        f"{dead.max():.0%} of the replayed experts have gate weight 0 in {context.spec.layers[layer]}: the weights are "
        "gathered from scores that were zeroed outside the router's own choice",
    )


@CHECKS.add("group-limit", "The final selection is replaced, not limited to the router's own groups", needs=PLACEMENT)
def _group_limit(context: CheckContext) -> None:
    """Replay more picks than there are live groups, each of which may be in a group of its own."""
    limit = context.adapter.group_limit
    if limit is None:
        raise Unsupported("the router has no group limit")
    size = context.spec.num_experts // limit.count
    top_k = min(limit.live + 2, limit.live * size)
    if top_k <= limit.live:
        raise Unsupported(f"{limit.live} groups of {size} experts leave no choice to exceed the limit")
    require_foreign_followed(context, Case(top_k=top_k), where=f"routes over more than {limit.live} groups")


@CHECKS.add(
    "router-gradient",
    "Routers get the gradient of the loss under the replayed routes",
    needs=("gate-rule", "dense-scores"),
)
def _router_gradient(context: CheckContext) -> None:
    """Compare gradients under the model's own routes with its own, and under others with those of the loss."""
    untouched = context.untouched()
    untouched.forward(context.base).backward()
    model, handle = context.pair()
    with handle.replay(context.native_trace()):
        model.forward(context.base).backward()
    name, off = furthest(untouched.gradients(), model.gradients())
    require(off <= TOLERANCE, f"under the model's own routes the gradient of {name} is off by {off:.2g} of its size")
    finite_differences(context, context.foreign(context.spec, context.base))


def finite_differences(context: CheckContext, trace: RoutingTrace) -> None:
    """Raise `CheckFailed` unless the gradient of each router is that of the loss under the trace."""
    model, handle = context.pair()

    def loss() -> float:
        with handle.replay(trace):
            return model.forward(context.base, grad=False).seen.loss

    with handle.replay(trace):
        model.forward(context.base).backward()
    gradients = model.gradients()
    for name in model.router_weights:
        gradient = np.asarray(gradients.get(name, np.zeros(1)), np.float64)
        size = float(np.linalg.norm(gradient))
        require(size > 0, f"the gradient of {name} is zero under the trace: the router is detached")
        # along the gradient itself, where the loss changes most and a wrong one shows
        step = STEP * gradient / size
        model.add_to(name, step)
        above = loss()
        model.add_to(name, -2 * step)
        below = loss()
        model.add_to(name, step)  # back to where it was, for the router that comes next
        slope = (above - below) / (2 * STEP)
        # A tenth for the curvature of the loss, and 2e-4 for the rounding of a float32 loss over twice the step.
        require(
            abs(slope - size) <= 0.1 * size + 2e-4,
            f"the gradient of {name} has size {size:.3g}, finite differences of the loss say {slope:.3g}",
        )


def furthest(expected: Mapping[str, NDArray[Any]], seen: Mapping[str, NDArray[Any]]) -> tuple[str, float]:
    """The parameter whose gradient is furthest off, relative to the largest gradient of its own."""
    off = {
        name: float(np.abs(seen[name] - value).max() / max(float(np.abs(value).max()), 1e-12)) if name in seen else 1.0
        for name, value in expected.items()
    }
    # a parameter without a gradient is as far off as can be
    worst = max(off, key=lambda name: off[name])
    return worst, off[worst]
