"""Do replayed routes reach the tokens and layers that they belong to, and what becomes of tokens without a route?"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import Batch, Case, Padding, Unsupported
from foreroute.conformance.check import (
    FOREIGN_VERSION,
    PLACEMENT,
    Check,
    CheckContext,
    CheckFailed,
    misplaced,
    refused,
    require,
    same_sets,
)
from foreroute.trace import RoutingTrace, extended

WIDE = 264
"""More experts than one byte tells apart, and a multiple of the usual group counts."""


def _placed(check: str, context: CheckContext) -> None:
    """Fail where foreign routes, with and without a row for the last token, end up in the way a check is about."""
    found = context.placement
    if found is not None and found.check == check:
        raise CheckFailed(found.sentence)


def _one_pick(context: CheckContext) -> None:
    """Replay one pick a token, expert 0 among them."""
    # zeros are where many adapters see padding
    _follows(context, Case(top_k=1))


def _wide(context: CheckContext) -> None:
    """Replay ids that a byte does not hold."""
    # above 255 for an unsigned one, above 127 for a signed one
    _follows(context, Case(num_experts=WIDE), low=WIDE - 8)
    _follows(context, Case(num_experts=WIDE), low=120)


def _follows(context: CheckContext, case: Case, *, low: int = 0) -> None:
    """Foreign routes on another shape of model; with one pick, expert 0 is among them many times."""
    model, handle = context.pair(case)
    wanted = context.foreign(handle.spec, context.base, low=low)
    native = context.untouched(case).forward(context.base, grad=False).seen
    with handle.replay(wanted):
        seen = model.forward(context.base, grad=False).seen
    found = misplaced(wanted, seen.ids_NLK, native.ids_NLK)
    require(found is None, found.sentence if found else "")


def _resumed(context: CheckContext) -> None:
    """Replay a rollout that was interrupted and went on under new weights."""
    # both parts are foreign, and of different draws, so that neither can stand for the other
    whole = context.foreign(context.spec, context.base).with_weight_version(4)
    first = context.foreign(context.spec, context.base, seed=2).truncated(np.full(len(whole), 7))
    joined = extended(first.with_weight_version(3), whole)
    found = misplaced(joined, context.replayed(joined).ids_NLK, context.native.ids_NLK)
    require(found is None, f"with rows of weight versions {joined.versions}: {found.sentence}" if found else "")


def _missing_rows(context: CheckContext) -> None:
    """Look at where a token without a row goes."""
    # many adapters fill in zeros, which are a route to expert 0
    seen = context.native_replay
    last = np.cumsum(context.base.lengths) - 1
    # the input of the first routed layer does not depend on what is replayed; that of later ones may
    same = same_sets(context.native.ids_NLK[last, 0], seen.ids_NLK[last, 0])
    require(
        bool(same.all()),
        f"the last token has no row, so the model routes it itself to {context.native.ids_NLK[last[0], 0].tolist()} "
        f"in its first routed layer; it was computed by {seen.ids_NLK[last[0], 0].tolist()}",
    )


def _gaps(context: CheckContext) -> None:
    """Replay a trace with a row missing in the middle: refusing it, or the model's own route, is right."""
    # taking another row's route silently is not
    model, handle = context.pair()
    batch, native = context.base, context.native.ids_NLK
    length = len(batch.sequences[0])
    valid = [np.arange(length) != (4 if s == 1 else length - 1) for s in range(len(batch.sequences))]
    trace = RoutingTrace.from_rows(
        handle.spec,
        batch.sequences,
        np.split(native, len(batch.sequences)),
        valid=valid,
        weight_versions=[np.full(length, FOREIGN_VERSION)] * len(valid),
    )
    executed = []

    def run() -> None:
        with handle.replay(trace):
            executed.append(model.forward(batch, grad=False).seen.ids_NLK[length + 4, 0])

    if refused(run) is None:
        require(
            bool(same_sets(native[length + 4, 0], executed[0])),
            f"position 4 of sequence 1 has no row and was not refused; it was computed by {executed[0].tolist()} "
            f"instead of the model's own {native[length + 4, 0].tolist()}",
        )


def _padding_neutral(context: CheckContext) -> None:
    """Replay padded batches, on each side that the framework knows."""
    tried = 0
    sides: tuple[Padding, ...] = ("right", "left")
    for padding in sides:
        try:
            _follows_when_padded(context, padding)
            tried += 1
        except Unsupported:
            continue
    if not tried:
        raise Unsupported("the framework has no padded batches")


def _follows_when_padded(context: CheckContext, padding: Padding) -> None:
    batch = context.batch(9, 4, 6, padding=padding)
    native = context.untouched().forward(batch, grad=False).seen
    wanted = context.foreign(context.spec, batch)
    found = misplaced(wanted, context.replayed(wanted, batch).ids_NLK, native.ids_NLK)
    require(found is None, f"in a batch padded on the {padding}: {found.sentence}" if found else "")


def _hot_spot(context: CheckContext) -> None:
    """Padding goes where the untouched model sends it, or is spread; no expert gets much more than its share."""
    # mostly padding, whose share of an expert then shows
    batch = context.batch(14, 3, 3, 2, padding="right")
    untouched = context.untouched().forward(batch, grad=False).seen
    if untouched.padding_ids_PLK is None:
        raise Unsupported("padding is not routed in this framework, or not visible to the probe")
    trace = context.trace_of(_packed(untouched.ids_NLK, batch), batch)
    seen = context.replayed(trace, batch).padding_ids_PLK
    if seen is None or same_sets(untouched.padding_ids_PLK[:, 0], seen[:, 0]).all():
        return
    fair = seen.shape[0] * context.spec.top_k / context.spec.num_experts
    hottest = int((seen[:, 0, :, None] == np.arange(context.spec.num_experts)).any(axis=1).sum(axis=0).max())
    require(
        hottest <= 2 * fair + 1,
        f"{hottest} of {len(seen)} padding rows go to one expert in {context.spec.layers[0]}, where {fair:.1f} would "
        "be its share; the untouched model routes them otherwise",
    )


def _packed(ids_NLK: NDArray[Any], batch: Batch) -> list[NDArray[Any]]:
    """S arrays [T, L, K], one for each sequence."""
    return np.split(ids_NLK, np.cumsum(batch.lengths)[:-1])


CHECKS = (
    Check(
        "routes-followed",
        "Every token is computed by the experts of the trace",
        partial(_placed, "routes-followed"),
        quick=True,
    ),
    Check("silent-no-op", "A replay that has no effect is never silent", partial(_placed, "silent-no-op"), quick=True),
    Check(
        "token-shift",
        "Row p is the routing of input position p, with T or T - 1 rows",
        partial(_placed, "token-shift"),
        quick=True,
    ),
    Check(
        "sequence-order",
        "Rows of a batch are read in the order in which they were written",
        partial(_placed, "sequence-order"),
        quick=True,
    ),
    Check(
        "layer-axis",
        "The layer axis is read by its table: dense layers have no row",
        partial(_placed, "layer-axis"),
        quick=True,
    ),
    Check("one-pick", "With K = 1, a row of expert 0 is a route like any other", _one_pick, needs=PLACEMENT),
    Check("wide-ids", "Expert ids above 127 and above 255 survive", _wide, needs=PLACEMENT),
    Check(
        "resumed-rollout",
        "A resumed rollout keeps the rows of both weight versions, once each",
        _resumed,
        needs=PLACEMENT,
    ),
    Check(
        "missing-rows",
        "A token without a route is routed by the model itself, not to expert 0",
        _missing_rows,
        needs=PLACEMENT,
        quick=True,
    ),
    Check(
        "gaps",
        "A row that is absent in the middle of a sequence is refused, or routed by the model itself",
        _gaps,
        needs=PLACEMENT,
        quick=True,
    ),
    Check("padding-neutral", "Padding, on either side, moves no route", _padding_neutral, needs=PLACEMENT, quick=True),
    Check("padding-hot-spot", "Padding makes no expert hot", _hot_spot, needs=PLACEMENT, quick=True),
)
