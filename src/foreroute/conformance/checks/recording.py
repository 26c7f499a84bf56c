"""What is recorded is what was executed: once per row, in order, in the width of the model."""

from __future__ import annotations

import numpy as np

from foreroute.conformance.adapter import Case
from foreroute.conformance.check import Check
from foreroute.conformance.checks.placement import WIDE
from foreroute.conformance.situation import Situation, require, same_sets


def _faithful(situation: Situation) -> None:
    model, handle = situation.pair()
    with handle.record(weight_version=5) as recording:
        seen = model.forward(situation.base, grad=False).seen
    trace = recording.trace()
    require(
        np.array_equal(trace.lengths, situation.base.lengths)
        and np.array_equal(trace.token_ids_N, np.concatenate(situation.base.sequences)),
        f"sequences of lengths {situation.base.lengths.tolist()} were recorded with lengths {trace.lengths.tolist()}"
        " or other tokens",
    )
    require(trace.versions == (5,), f"rows of weight version 5 were stamped {trace.versions}")
    routed = trace.valid_N
    recorded, executed = trace.expert_ids_NLK[routed], seen.ids_NLK[routed]
    if situation.adapter.picks_in_order:
        wrong = (recorded != executed).any(axis=(1, 2))
    else:
        wrong = ~same_sets(recorded, executed).all(axis=1)
    require(not wrong.any(), f"{int(wrong.sum())} of {len(wrong)} recorded rows are not what the experts were given")


def _once(situation: Situation) -> None:
    model, handle = situation.pair(Case(checkpointing=True))
    batch = situation.base
    with handle.record() as recording:
        model.forward(batch).backward()
    rows = recording.trace().num_rows
    expected = int(batch.lengths.sum())
    require(rows == expected, f"{expected} tokens were recorded as {rows} rows once backward had recomputed them")


def _width(situation: Situation) -> None:
    for case, expected in ((Case(), situation.spec.id_dtype), (Case(num_experts=WIDE), np.dtype(np.uint16))):
        model, handle = situation.pair(case)
        low = situation.foreign(handle.spec, situation.base).expert_ids_NLK % min(handle.spec.num_experts, 256)
        ids = np.argsort(np.argsort(low, axis=-1), axis=-1)  # small distinct ids
        trace = situation.trace_of(np.split(ids, len(situation.base.sequences)), situation.base, handle.spec)
        with handle.replay(trace), handle.record() as recording:
            model.forward(situation.base, grad=False)
        recorded = recording.trace()
        require(
            recorded.expert_ids_NLK.dtype == expected,
            f"a model of {handle.spec.num_experts} experts was recorded as {recorded.expert_ids_NLK.dtype} because the "
            f"ids at hand are small; expected {expected}",
        )


CHECKS = (
    Check(
        "recording-faithful",
        "A recording holds what was executed, token by token",
        "Compares a recording with what the experts were given.",
        _faithful,
        quick=True,
    ),
    Check(
        "recorded-once",
        "Recomputation records no row a second time",
        "Records a forward and a backward with recomputation, and counts rows.",
        _once,
    ),
    Check(
        "int-width",
        "The width of ids follows the model, never the ids at hand",
        f"Records small ids on the family's own model and on one of {WIDE} experts, and looks at the dtype.",
        _width,
    ),
)
