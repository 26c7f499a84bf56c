"""Do replayed routes reach the tokens and layers that they belong to, and what becomes of tokens without a route?"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from foreroute.conformance.adapter import Case, Padding, Unsupported
from foreroute.conformance.check import (
    FOREIGN_VERSION,
    PLACEMENT,
    Check,
    CheckContext,
    CheckFailed,
    Checks,
    require,
    require_followed,
    require_foreign_followed,
    unless_refused,
)
from foreroute.trace import RoutingTrace, extended
from foreroute.trace.operations import same_sets

WIDE = 264
"""More experts than one byte tells apart, and a multiple of the usual group counts."""
PLACED = {
    "routes-followed": "Every token is computed by the experts of the trace",
    "silent-no-op": "A replay that has no effect is never silent",
    "token-shift": "Row p is the routing of input position p, with T or T - 1 rows",
    "sequence-order": "Rows of a batch are read in the order in which they were written",
    "layer-axis": "The layer axis is read by its table: dense layers have no row",
}
"""Titles of the checks of `PLACEMENT`."""


def _placed(check: str, context: CheckContext) -> None:
    """Fail where foreign routes, with and without a row for the last token, end up in the way a check is about."""
    found = context.placement
    if found is not None and found.check == check:
        raise CheckFailed(found.sentence)


CHECKS = Checks(Check(check, title, partial(_placed, check), quick=True) for check, title in PLACED.items())


@CHECKS.add("one-pick", "With K = 1, a row of expert 0 is a route like any other", needs=PLACEMENT)
def _one_pick(context: CheckContext) -> None:
    """Replay one pick a token, expert 0 among them many times: zeros are where many adapters see padding."""
    require_foreign_followed(context, Case(top_k=1))


@CHECKS.add("wide-ids", "Expert ids above 127 and above 255 survive", needs=PLACEMENT)
def _wide(context: CheckContext) -> None:
    """Replay ids that a byte does not hold."""
    # above 255 for an unsigned one, above 127 for a signed one
    require_foreign_followed(context, Case(num_experts=WIDE), low=WIDE - 8)
    require_foreign_followed(context, Case(num_experts=WIDE), low=120)


@CHECKS.add("resumed-rollout", "A resumed rollout keeps the rows of both weight versions, once each", needs=PLACEMENT)
def _resumed(context: CheckContext) -> None:
    """Replay a rollout that was interrupted and went on under new weights."""
    # both parts are foreign, and of different draws, so that neither can stand for the other
    whole = context.foreign(context.spec, context.base).with_weight_version(4)
    first = context.foreign(context.spec, context.base, seed=2).truncated(np.full(len(whole), 7))
    joined = extended(first.with_weight_version(3), whole)
    where = f"with rows of weight versions {joined.versions}"
    require_followed(joined, context.replayed(joined), context.native, where)


@CHECKS.add(
    "missing-rows",
    "A token without a route is routed by the model itself, not to expert 0",
    needs=PLACEMENT,
    quick=True,
)
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


@CHECKS.add(
    "gaps",
    "A row that is absent in the middle of a sequence is refused, or routed by the model itself",
    needs=PLACEMENT,
    quick=True,
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

    def run() -> Any:
        with handle.replay(trace):
            return model.forward(batch, grad=False).seen.ids_NLK[length + 4, 0]

    executed, own = unless_refused(run), native[length + 4, 0]
    if executed is not None:
        require(
            bool(same_sets(own, executed)),
            f"position 4 of sequence 1 has no row and was not refused; it was computed by {executed.tolist()} "
            f"instead of the model's own {own.tolist()}",
        )


@CHECKS.add("padding-neutral", "Padding, on either side, moves no route", needs=PLACEMENT, quick=True)
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
    require_followed(wanted, context.replayed(wanted, batch), native, f"in a batch padded on the {padding}")


@CHECKS.add("padding-hot-spot", "Padding makes no expert hot", needs=PLACEMENT, quick=True)
def _hot_spot(context: CheckContext) -> None:
    """Padding goes where the untouched model sends it, or is spread; no expert gets much more than its share."""
    # mostly padding, whose share of an expert then shows
    batch = context.batch(14, 3, 3, 2, padding="right")
    untouched = context.untouched().forward(batch, grad=False).seen
    if untouched.padding_ids_PLK is None:
        raise Unsupported("padding is not routed in this framework, or not visible to the probe")
    trace = context.trace_of(np.split(untouched.ids_NLK, np.cumsum(batch.lengths)[:-1]), batch)
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
