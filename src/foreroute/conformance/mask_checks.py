"""Sampling masks: an adapter that computes log-probabilities itself computes them on the recorded sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance.adapter import Unsupported
from foreroute.conformance.check import CheckContext, Checks, refused, require
from foreroute.conformance.gate_checks import finite_differences
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace

TOLERANCE = 1e-4
"""In nats: what float32 makes of sums in another order, in the small models of the kit."""
OTHERS = 3
"""Tokens of a set beside the one that was sampled."""
CHECKS = Checks()


@CHECKS.add(
    "masks-followed",
    "Log-probabilities are those on the recorded sets, and gradients are theirs",
    needs=("router-gradient",),
)
def _followed(context: CheckContext) -> None:
    """Compare log-probs on the sets with the untouched model's, and their gradient with finite differences."""
    _require_scores(context)
    sets = _sets(context)
    trace = _with_sets(context, sets)
    expected = _logprobs_on(context, sets)
    seen = context.replayed(trace).logprobs_R
    off = float(np.abs(seen - expected).max())
    of_all = float(np.abs(seen - context.native.logprobs_R).max())
    require(
        off <= TOLERANCE,
        "log-probs are those over all tokens: the masks were dropped, and nothing was raised"
        if of_all <= TOLERANCE
        else f"log-probs are off those on the sets by up to {off:.3g} nats, and off those over all tokens by "
        f"{of_all:.3g}: sets of other rows were taken, or another temperature",
    )
    # a value may be right beside a gradient over all tokens
    finite_differences(context, trace)


@CHECKS.add(
    "masks-refused", "A set that leaves out the sampled token, or is missing, is refused", needs=("masks-followed",)
)
def _refused(context: CheckContext) -> None:
    """Replay sets that are not those of their tokens."""
    _require_scores(context)
    # a row scored on another's set has a finite log-prob, which looks like any other
    sets = _sets(context)
    for what, trace in (
        ("sets of another sequence, which leave out the sampled token,", _with_sets(context, sets[1:] + sets[:1])),
        ("a sampled token without a set", _without_a_set(_with_sets(context, sets))),
    ):
        require(refused(partial(context.replayed, trace)) is not None, f"{what} was not refused")


def _require_scores(context: CheckContext) -> None:
    """Raise `Unsupported` where log-probs are made by the adapter's caller."""
    if not context.adapter.scores_on_sets:
        raise Unsupported("the adapter leaves log-probabilities to its caller (scores_on_sets)")


def _sets(context: CheckContext) -> list[NDArray[np.int64]]:
    """The last token of each sequence and a few others, which are those of no other sequence."""
    last = [int(tokens[-1]) for tokens in context.base.sequences]
    # disjoint, so that a set of another sequence never holds the sampled token
    free = np.setdiff1d(np.arange(1, context.adapter.vocabulary), last)
    parts = [free[s * OTHERS : (s + 1) * OTHERS] for s in range(len(last))]
    return [np.append(part, token) for part, token in zip(parts, last, strict=True)]


def _with_sets(context: CheckContext, sets: Sequence[NDArray[np.int64]]) -> RoutingTrace:
    """The model's own routes, with a set for the last token of each sequence; nothing was left out of the others."""
    trace = context.native_trace()
    valid, counts = np.ones(trace.num_rows, np.bool_), np.zeros(trace.num_rows, np.int64)
    ends = trace.offsets[1:] - 1
    valid[ends], counts[ends - 1] = False, [len(each) for each in sets]
    stream = DecisionStream.from_sets(context.adapter.vocabulary, valid, counts, np.concatenate(sets))
    return trace.with_stream(SAMPLING, stream)


def _without_a_set(trace: RoutingTrace) -> RoutingTrace:
    """The same sets without that of the first sequence's last token."""
    return trace.with_stream(SAMPLING, trace.streams[SAMPLING].without(trace.offsets[1:2] - 2))


def _logprobs_on(context: CheckContext, sets: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Compute the log-probs on the sets from the untouched model's of each token of a set in the last place."""
    base, ends = context.base, np.cumsum(context.base.lengths - 1) - 1
    model = context.untouched()
    of_set = []
    # the untouched model scores one token at a place, so each token of a set is put there once, and summed here
    for index in range(OTHERS + 1):
        changed = tuple(
            np.append(tokens[:-1], own[index]).astype(np.int32)
            for tokens, own in zip(base.sequences, sets, strict=True)
        )
        of_set.append(model.forward(replace(base, sequences=changed), grad=False).seen.logprobs_R[ends])
    expected = context.native.logprobs_R.astype(np.float64)
    # the sampled token is the last of its set
    expected[ends] = of_set[-1] - np.logaddexp.reduce(np.array(of_set, np.float64), axis=0)
    return expected
