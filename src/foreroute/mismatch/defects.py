"""Names the defect that explains why two traces of the same tokens differ, if one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError
from foreroute.layout.match_tokens import order_by_tokens
from foreroute.mismatch.mixups import Defect, Mixup, TracePair, mixups
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trace.checks import as_offsets
from foreroute.trace.container import on_common_layers
from foreroute.trace.operations import overlap

NATURAL = 0.20
"""Share of differing routing decisions up to which a difference counts as numerical: bfloat16 engines show 5-15 %,
about 10 % in the R3 paper (arXiv 2510.11370, section 3.2)."""
NAMES = ("the reference", "the other trace")
# All limits of this file are chosen by hand. `tests/mismatch/test_explain.py` checks them together: on 200 seeded pairs
# every planted defect is named, and none where there is natural mismatch alone.
_MIN_EVIDENCE = 12.0
"""Routers' worth of agreement that a supposed mix-up must win before it is believed; of a prefix, the differing routers
beyond those of natural mismatch. Where decisions differ independently, the best of all prefixes reached 6.8 in 2,000
trials; where they differ in bursts, 43.2, and the other limits have to hold."""
_MIN_GAIN, _MIN_COVERED = 0.02, 0.5
"""Agreement that it must win on average over all routers, and reach over those that it restores: a mix-up of a few
sequences wins little, a wrong guess restores nothing."""
_REPLACED, _BROKEN = 0.7, 0.6
"""Shares of differing decisions from which a layer counts as unrelated, and a prefix: well above `NATURAL`, and below
the share of unrelated routes, which is nearly 1."""


@dataclass(frozen=True)
class Explanation:
    """Difference of two traces, and its cause.

    Attributes:
        defect: what sets them apart, `Defect.NONE` for natural mismatch.
        parameters: what defines the defect (`tokens` of a shift, `order` of a permutation, `rows` of a prefix, ...).
        sentence: the defect for a reader, in whole sentences.
        differing: share of routing decisions, one for each token and layer, whose expert sets differ.
        overlap_by_layer_L: float64 [L], mean share of common picks, over rows that both traces routed.
        overlap_by_position_T: float64 [longest sequence], NaN where no sequence has a row.
    """

    defect: Defect
    parameters: Mapping[str, Any]
    sentence: str
    differing: float
    overlap_by_layer_L: NDArray[np.float64]
    overlap_by_position_T: NDArray[np.float64]


class _Finding(NamedTuple):
    defect: Defect
    parameters: Mapping[str, Any]
    sentence: str


def explain(a: RoutingTrace, b: RoutingTrace, *, names: tuple[str, str] = NAMES) -> Explanation:
    """Compare `b` with the reference `a` and name what sets them apart.

    Large traces are sampled for the search; overlaps are exact. Shifts beyond 256 tokens, permutations of more
    than 256 sequences and renamings of more than 1,024 experts are not looked for. Where layers differ in E or K,
    mix-ups are looked for in those of one size.

    Args:
        a: the reference, say the trainer's own routes.
        b: the trace in question, say the engine's. Its sequences may come in another order.
        names: what a sentence calls `a` and `b`: singular, and as in the middle of a sentence.

    Raises:
        SpecMismatchError: when the traces come from different models.
        BatchMismatchError: when they do not hold the same sequences.
        InputError: when no row is routed in both.
    """
    a, b = on_common_layers([a, b], what="the second trace")
    order = _order(a, b)
    if order is not None:
        b = b.select(np.argsort(order))
    shared_RL, rows_R = overlap(a, b)
    if not len(rows_R):
        raise InputError(
            "no row is routed in both traces, so there is nothing to compare; expected two traces of the same tokens "
            "with routes (foreroute inspect shows what each has)"
        )
    longest = int(a.lengths.max(initial=0))
    alike_a, alike_b = (part.select_layers(_alike(a.spec)) if a.spec.sizes else part for part in (a, b))
    pair = TracePair(alike_a, alike_b, np.random.default_rng(0))
    positions, share_RL = pair.a.positions_N[rows_R], shared_RL / a.spec.picks_L
    with np.errstate(invalid="ignore"):  # 0 of 0 rows is NaN
        by_position = np.bincount(positions, share_RL.mean(axis=1), longest) / np.bincount(positions, minlength=longest)
    differs_RL = share_RL < 1
    finding = _found(pair, a.spec, positions, differs_RL, order, names)
    return Explanation(*finding, float(differs_RL.mean()), share_RL.mean(axis=0), by_position)


def _found(
    pair: TracePair,
    spec: RoutingSpec,
    positions: NDArray[np.int64],
    differs_RL: NDArray[np.bool_],
    order: NDArray[np.int64] | None,
    names: tuple[str, str],
) -> _Finding:
    """Return the first defect that explains the difference, mix-ups before losses before drift."""
    if pair.a.spec.top_k == pair.a.spec.num_experts:
        return _Finding(Defect.NONE, {}, "Nothing to compare: every row holds all experts.")
    if order is not None:
        facts = {"order": order.tolist(), "with_tokens": True}
        sentence = f"{_capital(names[1])} holds the sequences of {names[0]} in another order, tokens included."
        return _Finding(Defect.PERMUTATION, facts, sentence)
    # of one row in one layer nothing can be mixed up
    best = max(mixups(pair), key=lambda mixup: mixup.total, default=None)
    return (
        (None if best is None else _of_mixup(pair, best, names[1]))
        or _prefix_absent(pair, differs_RL, names)
        or _prefix_garbage(positions, differs_RL)
        or _layer_replaced(spec, differs_RL)
        or _drift(pair, differs_RL, names)
    )


def _of_mixup(pair: TracePair, mixup: Mixup, name: str) -> _Finding | None:
    """Return a mix-up that wins enough agreement to be believed."""
    gain, spec = mixup.total - pair.before, pair.a.spec
    if gain * pair.num_routers < _MIN_EVIDENCE or gain < _MIN_GAIN or mixup.covered < _MIN_COVERED:
        return None
    return _Finding(mixup.defect, mixup.parameters, f"{_capital(name)} {_predicate(mixup, spec)}.")


def _predicate(mixup: Mixup, spec: RoutingSpec) -> str:
    """Say what a mix-up did to a trace, within a sentence."""
    defect, p = mixup.defect, mixup.parameters
    if defect is Defect.SHIFT:
        source = f"p {'-' if p['tokens'] > 0 else '+'} {abs(p['tokens'])}"
        return f"is shifted by {_steps(p['tokens'], 'token')}: its row p holds the routes of row {source}"
    if defect is Defect.LAYER_OFFSET:
        axis = ": an axis of all layers was read as one of routed layers, or the other way round"
        return f"is offset by {_steps(p['layers'], 'layer')}{axis if p['dense_first'] else ''}"
    if defect is Defect.LAYER_ORDER:
        moved = [f"{spec.layers[at]} has those of {spec.layers[of]}" for at, of in enumerate(p["order"]) if at != of]
        return (
            f"has the routes of its layers in another order: {', '.join(moved[:8])}{', ...' if len(moved) > 8 else ''}"
        )
    if defect is Defect.FLATTENING:
        return f"was flattened {p['written']} and read {p['read']} (padded to {p['width']})"
    if defect is Defect.PERMUTATION:
        return f"holds the routes of other sequences: those of the sequences {listed(p['order'])}, in this order"
    return (
        f"calls the experts by other ids, by a fixed map in each layer ({sum(p['moved'])} of "
        f"{spec.num_experts * spec.num_layers} are renamed): physical experts instead of logical ones"
    )


def _prefix_absent(pair: TracePair, differs_RL: NDArray[np.bool_], names: tuple[str, str]) -> _Finding | None:
    """Find leading rows that one trace routed and the other lacks."""
    for lacking, other, name in ((pair.b, pair.a, names[1]), (pair.a, pair.b, names[0])):
        # Only what the other has before the first row that it has of a sequence is a lost prefix.
        routed_before = as_offsets(lacking.valid_N.astype(np.int64))
        leading_N = routed_before[1:] == routed_before[lacking.offsets[:-1]][pair.sequences]
        lost = np.bincount(pair.sequences, other.valid_N & leading_N, len(pair.a)).astype(np.int64)
        # One lost row is what every sampled sequence of one token has.
        if (lost > 1).any() and differs_RL.mean() <= NATURAL:
            sentence = f"{_capital(name)} lacks the first rows of its sequences, up to {lost.max()} of them."
            return _Finding(Defect.PREFIX_MISSING, {"rows": int(lost.max()), "absent": True}, sentence)
    return None


def _prefix_garbage(positions: NDArray[np.int64], differs_RL: NDArray[np.bool_]) -> _Finding | None:
    """Find a position below which nearly everything differs, and above which next to nothing does."""
    longest = int(positions.max()) + 1
    routers = np.cumsum(np.bincount(positions, minlength=longest)) * differs_RL.shape[1]
    differing = np.cumsum(np.bincount(positions, differs_RL.sum(axis=1), longest))
    if longest == 1:
        return None
    # the position that parts differing routers from others best: with fewest on the wrong side
    last = int(np.argmax(2 * differing[:-1] - routers[:-1]))
    above_differing, above_routers = differing[-1] - differing[last], routers[-1] - routers[last]
    if differing[last] < _BROKEN * routers[last] or above_differing > NATURAL * above_routers:
        return None
    if differing[last] - NATURAL * routers[last] < _MIN_EVIDENCE:
        return None
    first = f"The first {last + 1} rows of the sequences are" if last else "The first row of each sequence is"
    sentence = f"{first} unrelated, and from position {last + 1} on the traces agree."
    return _Finding(Defect.PREFIX_MISSING, {"rows": last + 1, "absent": False}, sentence)


def _layer_replaced(spec: RoutingSpec, differs_RL: NDArray[np.bool_]) -> _Finding | None:
    """Find the one layer that is unrelated where all others agree."""
    by_layer = differs_RL.mean(axis=0)
    ordered = np.sort(by_layer)
    # The others are natural on average, and the worst of them is within half as much again as natural: one layer may
    # be noisier than the rest, but nowhere near an unrelated one.
    if len(by_layer) < 3 or ordered[-1] < _REPLACED or ordered[:-1].mean() > NATURAL or ordered[-2] > 0.3:
        return None
    column = int(np.argmax(by_layer))
    layer = spec.layers[column]
    sentence = f"Only {layer} is unrelated: another layer's routes (a draft or MTP layer?) took its place."
    return _Finding(Defect.LAYER_REPLACED, {"layer": layer.index, "row": column}, sentence)


def _drift(pair: TracePair, differs_RL: NDArray[np.bool_], names: tuple[str, str]) -> _Finding:
    """Tell natural mismatch from other weights, where nothing is mixed up or lost."""
    versions = {"a": pair.a.versions, "b": pair.b.versions}
    by_layer, differing = differs_RL.mean(axis=0), float(differs_RL.mean())
    third = max(len(by_layer) // 3, 1)
    # Other weights move hidden states a little in every layer, which adds up: the last third of the layers differs
    # more.
    grows = by_layer[-third:].mean() - by_layer[:third].mean() > 0.1
    more = ", more of them in later layers" if grows else ""
    decisions = f"{differing:.1%} of the routing decisions, one for each token and layer, differ"
    if differing == 0:
        return _Finding(Defect.NONE, versions, "Both have the same experts in every row and layer.")
    if differing <= NATURAL:
        return _Finding(Defect.NONE, versions, f"Natural mismatch: {decisions}.")
    if versions["a"] != versions["b"]:
        of_a, of_b = (version_words(trace) or "unknown weights" for trace in (pair.a, pair.b))
        stated = f"{_capital(names[0])} is of {of_a}, {names[1]} of {of_b}."
        return _Finding(Defect.WEIGHT_VERSION, versions, f"Other weights: {decisions}{more}. {stated}")
    if grows:
        return _Finding(Defect.WEIGHT_VERSION, versions, f"Other weights: {decisions}{more}.")
    return _Finding(Defect.UNEXPLAINED, versions, f"Unexplained: {decisions}, and no known defect is the cause.")


def _alike(spec: RoutingSpec) -> list[RoutedLayer]:
    """List the layers of the size that most of them have, of those where a row does not hold all experts."""
    counts = Counter(spec.sizes_L)
    most = max(counts, key=lambda size: (size[1] < size[0], counts[size]))
    return [layer for layer, size in zip(spec.layers, spec.sizes_L, strict=True) if size == most]


def _capital(name: str) -> str:
    """Return a name as at the beginning of a sentence."""
    return name[:1].upper() + name[1:]


def _steps(count: int, unit: str) -> str:
    """Write a number of steps with its sign."""
    return f"{count:+d} {unit}{'' if abs(count) == 1 else 's'}"


def listed(numbers: Sequence[int]) -> str:
    """Write numbers within a sentence, the first of many."""
    return ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")


def version_words(trace: RoutingTrace) -> str:
    """Name the weight versions that a trace states, within a sentence; "" where it states none."""
    known = [version for version in trace.versions if version >= 0]
    return f"weight version{'' if len(known) == 1 else 's'} {', '.join(map(str, known))}" if known else ""


def _order(a: RoutingTrace, b: RoutingTrace) -> NDArray[np.int64] | None:
    """Return the sequence of `a` that each sequence of `b` is, int64 [S], where only their order differs; else None."""
    if np.array_equal(a.offsets, b.offsets) and np.array_equal(a.token_ids_N, b.token_ids_N):
        return None
    order = order_by_tokens(a, map(b.tokens, range(len(b))))
    return order if order is not None and np.array_equal(np.sort(order), np.arange(len(a))) else None
