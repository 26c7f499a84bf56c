"""A sentinel: tests what replayed passes showed against the past of their own run.

In a replayed pass all layers below a router are the rollout's, so that a router that would still pick otherwise, a
root, disagrees by itself. A healthy run has some, where rounding flips a near-tie; rows of another time, sequence or
layer have them nearly everywhere.

Letters: N packed rows, S sequences, L layers, B batches of the past, W rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import as_array
from foreroute.errors import InputError
from foreroute.trace import RoutingSpec
from foreroute.trace.checks import as_offsets, join_ranges

RATE, MOST_OF_BATCH = 1e-6, 1e-5
"""False alarms of a healthy run for each sequence: one third each is of sequences, of the layers and of all rows of
their batch. A batch and its layers have no more than `MOST_OF_BATCH` each, however many sequences it has. What it rests
on: blocks of rows are like those of the past and do not depend on each other; what a batch differs by from those before
it has a normal distribution of one variance, which is measured."""
WARM_UP = 8
"""Batches before tests begin: fewer do not show how much batches differ."""
KEPT, RECENT = 64, 8
"""Batches of the past that are kept, and the last ones, whose mean is expected of a batch: slow drift is healthy."""
WIDTHS = (1, 4, 8)
"""Rows of the blocks whose sums are looked at. Rows beside each other may be alike: then wide blocks say so."""
UNSEEN = 3.0
"""Blocks that differ throughout and are added to those that were seen: by the rule of three, n blocks without one
still leave a chance of 3 / n."""
LIMITS, SPREAD = (0.25, 0.5), 4.0
"""Share from which a row counts as evidence, instead of against it: between what sequences show by themselves, which is
their mean share and this many of its standard deviations, and 1."""
HIGHEST = 0.99
"""A higher share of a sequence is no usual one."""
ALONE, QUIET = 0.6, 0.25
"""Layers rose alone where the next one has risen by no more than this part; and one below which all have risen by no
more than that part began what layers above it follow."""
MOST, ALL = 0.5, 0.9
"""Share of a batch, and of a layer beside others, from which routes belong to something else, whatever the past."""
REPEATED, MATCHED, ONE_SIDE = 0.9, 0.15, 2.0
"""Share of layers in which rows repeat the row before where an engine froze; and in which natives are the rows on one
side of them, this often more than on the other, where rows are shifted: layers above ran on wrong experts, so that it
is less than all."""


class LooksLike(StrEnum):
    """Causes that the rows of an alarm look like."""

    STALE_ROWS = "stale-rows"
    OTHER_SEQUENCE = "other-sequence"
    SHIFT = "shifted-rows"
    FROZEN = "frozen-rows"
    STALE_LAYER = "stale-layer"
    OLDER_WEIGHTS = "older-weights"
    UNRELATED = "other-weights-or-tokens"

    @property
    def advice(self) -> str:
        """Advice on what to look at, in one sentence."""
        return ADVICE[self]


_PATHS = "Look at what brings routes from the engine to the trainer: prefix caches, and the order of sequences."
ADVICE = {
    LooksLike.STALE_ROWS: _PATHS,
    LooksLike.OTHER_SEQUENCE: _PATHS,
    LooksLike.SHIFT: "Look at where the routes of a request begin: with its first token, or with one before or after.",
    LooksLike.FROZEN: "Look at the buffer of routes in the engine: rows after the first of these were not written.",
    LooksLike.STALE_LAYER: "Look at what records the routes of that layer in the engine, and at its router weights.",
    LooksLike.OLDER_WEIGHTS: "Look at whether the last weights arrived in the engine, and at its precision.",
    LooksLike.UNRELATED: "Where k3 without replay rose too, look at whether the weights of the policy arrived in the "
    "engine, and else at the order of sequences.",
}
"""Advice by what the rows look like."""
OF_ROWS = ("roots_N", "before_N", "after_N", "repeats_N")
"""Counts of each row."""


@dataclass(frozen=True)
class RootCounts:
    """Counts of the rows of a replayed batch. Lists and arrays of integers; they are checked.

    Attributes:
        roots_N: [N], layers in which a row's router would pick other experts than are replayed.
        before_N: [N], layers in which it would pick those of the replayed row before.
        after_N: [N], layers in which it would pick those of the row behind.
        repeats_N: [N], layers in which the replayed row is that before it.
        roots_L: [L], rows of each layer whose router would pick others.
        lengths_S: [S], rows of each sequence, in their order.
    """

    roots_N: NDArray[np.int64]
    before_N: NDArray[np.int64]
    after_N: NDArray[np.int64]
    repeats_N: NDArray[np.int64]
    roots_L: NDArray[np.int64]
    lengths_S: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            array = as_array(getattr(self, name), name=name, error=InputError)
            if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
                raise InputError(f"{name} is no list of counts; expected integers of 0 or more, of one axis")
            object.__setattr__(self, name, array.astype(np.int64))
        rows, layers = int(self.lengths_S.sum()), len(self.roots_L)
        for name in OF_ROWS:
            counts_N = getattr(self, name)
            if len(counts_N) != rows or counts_N.max(initial=0) > layers:
                raise InputError(
                    f"{name} has {len(counts_N)} rows and up to {counts_N.max(initial=0)} layers; expected those of "
                    f"the {rows} rows of lengths_S, of {layers} layers"
                )
        if self.roots_L.max(initial=0) > rows:
            raise InputError(f"roots_L counts {self.roots_L.max()} rows of a layer; expected {rows} at most")

    def in_order(self, order_S: NDArray[np.integer]) -> RootCounts:
        """Give the same with sequence `order_S[s]` in place s; each stands there once."""
        rows_N = join_ranges(as_offsets(self.lengths_S)[order_S], self.lengths_S[order_S])
        of_rows = {name: getattr(self, name)[rows_N] for name in OF_ROWS}
        return RootCounts(**of_rows, roots_L=self.roots_L, lengths_S=self.lengths_S[order_S])


@dataclass(frozen=True)
class Suspicion:
    """A finding that a healthy run does not show.

    Attributes:
        looks_like: the likeliest cause.
        sentence: what was seen, and where.
        share: of (row, layer) among those concerned, how many would pick otherwise.
        usual: that share in the run so far; NaN before anything was judged by it.
        chance: upper bound of the chance that a healthy batch or sequence shows as much; 1 where that was not asked.
        sequence: in the batch, or None where all are concerned.
        since: position from which on, in a sequence.
        num_rows: how many rows are concerned.
        layer: column of the layer, or None.
    """

    looks_like: LooksLike
    sentence: str
    share: float
    usual: float
    chance: float
    sequence: int | None = None
    since: int | None = None
    num_rows: int = 0
    layer: int | None = None


class Sentinel:
    """Judges the replayed passes of one run, each by the run's past. What is suspected is not learnt.

    Args:
        spec: of the model, whose layers are named.
        rate: of false alarms, for each sequence.
    """

    def __init__(self, spec: RoutingSpec, rate: float = RATE) -> None:
        if not 0 < rate < 1:
            raise InputError(f"rate is {rate}; expected a share of false alarms above 0 and below 1")
        self._spec, self._rate = spec, rate
        self._past = _Past(spec.num_layers)

    @property
    def until_judged(self) -> int:
        """Return how many batches are still learnt before one is judged by the past."""
        return max(WARM_UP - len(self._past.angles_BL), 0)

    def state(self) -> NDArray[np.float64]:
        """Give the past, float64 [X], to be kept in a checkpoint; of one model it has the same length at any time."""
        return self._past.state()

    def restore(self, state: NDArray[np.float64]) -> None:
        """Take up the past that `state` gave for a model of as many layers. Raises `InputError` for anything else."""
        self._past.restore(state)

    def judge(self, counts: RootCounts) -> list[Suspicion]:
        """Test a batch, its layers and its sequences; what nothing is wrong with becomes part of the past.

        Batches are of passes at the weights of their rollout: those of later mini-batches differ by themselves.

        Returns:
            Suspicions; none of a healthy run but for the rate. Before `until_judged` is 0, those of a batch, or of a
            layer, that is wrong nearly everywhere.

        Raises:
            InputError: for counts of other layers than the model has.
        """
        num_layers = self._spec.num_layers
        if len(counts.roots_L) != num_layers:
            raise InputError(f"roots_L is of {len(counts.roots_L)} layers; expected {num_layers}, as the spec has")
        rows = int(counts.lengths_S.sum())
        if not rows or not num_layers:
            return []
        found = self._suspected(counts, rows)
        named = [each.sequence for each in found if each.sequence is not None]
        if len(named) == len(found):
            self._past.add(counts, np.array(named, np.int64))
        return found

    def _suspected(self, counts: RootCounts, rows: int) -> list[Suspicion]:
        rate = min(self._rate * np.count_nonzero(counts.lengths_S) / 3, MOST_OF_BATCH)
        past, is_judged, share_L = self._past, not self.until_judged, counts.roots_L / rows
        if not is_judged:
            usual_L = np.full(len(share_L), float(np.median(share_L)))
            found = [*self._layers(share_L, usual_L, np.ones(len(share_L)), rows, rate)]
            return found or self._whole(share_L, rows, rate)
        usual_L, chance_L = past.usual_L, past.chance_of_layers(share_L, rows)
        found = [*self._layers(share_L, usual_L, chance_L, rows, rate)]
        # wrong experts of a layer move those above it in all rows, which are no evidence against some of them
        sequences = [*self._sequences(counts, max(float(share_L.mean()) - past.usual, 0.0) if found else 0.0)]
        if found:
            return found + sequences
        whole = self._whole(share_L, rows, rate)
        return whole if whole and self._is_batch(counts, sequences, rate) else sequences or whole

    def _is_batch(self, counts: RootCounts, found: list[Suspicion], rate: float) -> bool:
        """Say whether all rows differ, of which those of some sequences do by more, and none says by what."""
        if not all(each.looks_like in (LooksLike.STALE_ROWS, LooksLike.OTHER_SEQUENCE) for each in found):
            return False
        is_other_N, offsets = np.ones(len(counts.roots_N), np.bool_), as_offsets(counts.lengths_S)
        for each in found:
            if each.sequence is not None and each.since is not None:
                start = int(offsets[each.sequence]) + each.since
                is_other_N[start : start + each.num_rows] = False
        roots_N = counts.roots_N[is_other_N]
        if not len(roots_N):
            return len(found) > 1
        return self._past.chance_of_batch(float(roots_N.mean()) / self._spec.num_layers, len(roots_N)) < rate

    def _layers(
        self, share_L: NDArray[np.float64], usual_L: NDArray[np.float64], chance_L: NDArray[Any], rows: int, rate: float
    ) -> Iterator[Suspicion]:
        """Find layers that alone would pick otherwise more often."""
        for layer in _layers_alone(share_L - usual_L).tolist():
            if chance_L[layer] < rate / len(share_L) or (share_L[layer] >= ALL and usual_L[layer] < MOST):
                yield Suspicion(
                    LooksLike.STALE_LAYER,
                    f"the router of {self._spec.layers[layer]} would pick other experts in {share_L[layer]:.1%} of "
                    f"{rows} rows, where {usual_L[layer]:.1%} are usual, and no other layer rose as much: its routes "
                    "are of another pass, or it has other weights",
                    float(share_L[layer]),
                    float(usual_L[layer]),
                    float(chance_L[layer]),
                    num_rows=rows,
                    layer=layer,
                )

    def _sequences(self, counts: RootCounts, of_layers: float) -> Iterator[Suspicion]:
        """Find sequences with a segment of rows that would pick otherwise, or repeat one, too often.

        What wrong layers explain, `of_layers`, is no evidence.
        """
        past, num_layers = self._past, self._spec.num_layers
        offsets = as_offsets(counts.lengths_S)
        best: dict[int, tuple[float, slice]] = {}
        tests = [(past.roots, counts.roots_N, of_layers, limit) for limit in LIMITS]
        usual = min(past.roots.highest + of_layers, HIGHEST)
        least_roots = num_layers * (usual + LIMITS[0] * (1 - usual))
        tests.append((past.repeats, counts.repeats_N, 0.0, LIMITS[-1]))
        for seen, counts_N, explained, limit in tests:
            highest = min(seen.highest + explained, HIGHEST)
            start_share = highest + limit * (1 - highest)
            if not (decay := seen.decay(start_share)):  # all that was seen is as high
                continue
            # a segment may begin at each row
            least_S = (np.log(np.maximum(counts.lengths_S, 1)) + math.log(3 * len(tests) / self._rate)) / decay
            for sequence, score, segment in _segments(counts_N / num_layers - start_share, offsets, least_S):
                # a text may repeat a token, on whose rows routers agree
                if seen is past.repeats and counts.roots_N[segment].mean() <= least_roots:
                    continue
                log_chance = math.log(len(tests) * max(int(counts.lengths_S[sequence]), 1)) - decay * score
                if log_chance < best.get(sequence, (0.0, segment))[0]:
                    best[sequence] = (log_chance, segment)
        for sequence, (log_chance, segment) in sorted(best.items()):
            yield self._of_segment(counts, sequence, segment, int(offsets[sequence]), log_chance)

    def _of_segment(
        self, counts: RootCounts, sequence: int, segment: slice, start: int, log_chance: float
    ) -> Suspicion:
        usual = self._past.usual
        first, num_rows, length = segment.start - start, segment.stop - segment.start, int(counts.lengths_S[sequence])
        share, before, after, repeats = (
            float(each[segment].mean()) / self._spec.num_layers
            for each in (counts.roots_N, counts.before_N, counts.after_N, counts.repeats_N)
        )
        if repeats >= REPEATED:
            looks_like, words = LooksLike.FROZEN, "they repeat one row: the engine no longer wrote routes"
        elif max(before, after) >= max(MATCHED, ONE_SIDE * min(before, after)):
            step = "of the next token" if before > after else "of the token before"
            looks_like, words = LooksLike.SHIFT, f"they hold the routes {step}"
        elif first <= WIDTHS[-1] and num_rows >= length - 2 * WIDTHS[-1]:
            looks_like, words = LooksLike.OTHER_SEQUENCE, "from first to last: they are another sequence's"
        else:
            looks_like, words = LooksLike.STALE_ROWS, "they are of another time, or of another sequence"
        return Suspicion(
            looks_like,
            f"sequence {sequence}, from position {first} on: in {num_rows} of {length} rows routers would pick other "
            f"experts in {share:.1%} of the layers, where {usual:.1%} are usual; {words}",
            share,
            usual,
            math.exp(max(log_chance, -700.0)),
            sequence=sequence,
            since=first,
            num_rows=num_rows,
        )

    def _whole(self, share_L: NDArray[np.float64], rows: int, rate: float) -> list[Suspicion]:
        """Find a batch of other tokens, whatever the past, or one whose rows all differ a little more than that."""
        share, usual = float(share_L.mean()), math.nan if self.until_judged else self._past.usual
        if share >= MOST:
            looks_like, chance = LooksLike.UNRELATED, 1.0
            words = ": the engine has other weights, or the routes are of other tokens"
        elif not self.until_judged and (chance := self._past.chance_of_batch(share, rows)) < rate:
            looks_like = LooksLike.OLDER_WEIGHTS
            words = f", where {usual:.1%} are usual: the rollout had older weights, or another precision"
        else:
            return []
        sentence = f"in all {rows} rows routers would pick other experts, in {share:.1%} of the layers{words}"
        return [Suspicion(looks_like, sentence, share, usual, chance, num_rows=rows)]


def _layers_alone(rise_L: NDArray[np.float64]) -> NDArray[np.int64]:
    """Find the few layers whose shares have risen, while others have by less or followed: int64, the most first."""
    order = np.argsort(-rise_L)
    rise = np.append(np.maximum(rise_L[order], 0.0), 0.0)
    for count in range(1, max(len(rise_L) // 4, 1) + 1):
        if rise[count] <= ALONE * rise[count - 1] and len(rise_L) > 1:
            return order[:count]
    began = order[0] > 0 and rise_L[: order[0]].max() <= QUIET * rise_L[order[0]]
    return order[: int(began)]


class _PastRows:
    """In how many layers rows of healthy batches showed one thing: counts of blocks, and no rows."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        # of each width, how many blocks had each sum
        self.blocks_W = [np.zeros(width * num_layers + 1, np.int64) for width in WIDTHS]
        # rows of all sequences, and the sums over rows of their sequence's share and of its square
        self.moments_3 = np.zeros(3)

    @property
    def highest(self) -> float:
        """The highest share that a sequence is expected to have."""
        rows, total, squares = self.moments_3
        mean = total / rows
        return float(min(mean + SPREAD * math.sqrt(max(squares / rows - mean**2, 0.0)), HIGHEST))

    def add(self, counts_N: NDArray[np.int64], lengths_S: NDArray[np.int64]) -> None:
        """Learn the rows of sequences."""
        for blocks, width in zip(self.blocks_W, WIDTHS, strict=True):
            # whole blocks, from the first row of each sequence on
            starts = as_offsets(lengths_S)[:-1]
            per_S = lengths_S // width
            first = np.repeat(starts - as_offsets(per_S)[:-1] * width, per_S) + np.arange(per_S.sum()) * width
            sums = np.append(0, np.cumsum(counts_N))
            blocks += np.bincount(sums[first + width] - sums[first], minlength=len(blocks))
        share_S = np.add.reduceat(np.append(counts_N, 0), as_offsets(lengths_S)[:-1]) if len(lengths_S) else lengths_S
        share_S = np.where(lengths_S > 0, share_S, 0) / (np.maximum(lengths_S, 1) * self.num_layers)
        self.moments_3 += [lengths_S.sum(), lengths_S @ share_S, lengths_S @ share_S**2]

    def decay(self, limit: float) -> float:
        """Find how fast the chance of a segment falls by score: E exp(decay * (share - limit)) = 1 for all blocks.

        Then exp(decay * sum) is a martingale, and that a segment from a row on reaches a score has a chance of at most
        exp(-decay * score). Rows of a block need not be independent, and blocks are taken to be.
        """
        # no sequence may have been as long as a wide block
        seen = [(blocks, width) for blocks, width in zip(self.blocks_W, WIDTHS, strict=True) if blocks.any()]
        return min(_root(blocks, width, self.num_layers, limit) for blocks, width in seen)


class _Past:
    """Figures of healthy batches of one kind."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.roots, self.repeats = _PastRows(num_layers), _PastRows(num_layers)
        self.angles_BL: list[NDArray[np.float64]] = []

    @property
    def usual_L(self) -> NDArray[np.float64]:
        """Share of roots in each layer that the next batch is expected to have."""
        return np.sin(np.mean(self.angles_BL[-RECENT:], axis=0)) ** 2  # type: ignore[no-any-return]

    @property
    def usual(self) -> float:
        """The same of all layers."""
        return float(self.usual_L.mean())

    def state(self) -> NDArray[np.float64]:
        """Give all of it as one array, with -1 for batches that there were not."""
        angles_BL = np.full((KEPT, self.num_layers), -1.0)
        angles_BL[: len(self.angles_BL)] = self.angles_BL or angles_BL[:0]
        rows = [part for each in (self.roots, self.repeats) for part in (*each.blocks_W, each.moments_3)]
        return np.concatenate([*rows, angles_BL.ravel()]).astype(np.float64)

    def restore(self, state: NDArray[np.float64]) -> None:
        """Take up what `state` gave."""
        given, expected = np.array(state), self.state()  # the past goes on in it
        if given.shape != expected.shape or given.dtype != expected.dtype:
            raise InputError(
                f"the past of a sentinel is {given.dtype} of shape {given.shape}; expected {expected.dtype} of shape "
                f"{expected.shape}, as state() of one for {self.num_layers} layers gives it"
            )
        if not (given >= -1).all():
            raise InputError(
                f"the past of a sentinel holds {given[~(given >= -1)][0]}; expected counts, and angles or -1, as "
                "state() gives them"
            )
        sizes = [width * self.num_layers + 1 for width in WIDTHS]
        for each in (self.roots, self.repeats):
            *blocks, each.moments_3, given = np.split(given, np.cumsum([*sizes, 3]))
            each.blocks_W = [part.astype(np.int64) for part in blocks]
        angles_BL = given.reshape(KEPT, self.num_layers)
        self.angles_BL = [*angles_BL[(angles_BL >= 0).all(1)]]

    def add(self, counts: RootCounts, left_out: NDArray[np.int64]) -> None:
        """Learn a batch but for some sequences, and its shares where there are none of these."""
        kept_S = ~np.isin(np.arange(len(counts.lengths_S)), left_out)
        kept_N, lengths_S = np.repeat(kept_S, counts.lengths_S), counts.lengths_S[kept_S]
        self.roots.add(counts.roots_N[kept_N], lengths_S)
        self.repeats.add(counts.repeats_N[kept_N], lengths_S)
        if not len(left_out):
            self.angles_BL.append(_angle(counts.roots_L / counts.lengths_S.sum()))
            del self.angles_BL[:-KEPT]

    def chance_of_layers(self, share_L: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Bound the chance of shares as high, float64 [L], by how far layers were from others before."""
        past_BL, now_L = np.stack(self.angles_BL), _angle(share_L)
        past_BL = past_BL - np.median(past_BL, axis=1, keepdims=True)
        return _chance(past_BL, now_L - np.median(now_L), rows)

    def chance_of_batch(self, share: float, rows: int) -> float:
        """Bound the chance of a share as high."""
        shares_B = (np.sin(np.stack(self.angles_BL)) ** 2).mean(axis=1)
        return float(_chance(_angle(shares_B)[:, None], _angle(np.array([share])), rows * self.num_layers)[0])


def _angle(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn shares of n into angles, whose standard deviation is 1 / (2 sqrt(n)) whatever the share."""
    return np.arcsin(np.sqrt(np.clip(share, 0, 1)))


def _chance(past_BX: NDArray[np.float64], now_X: NDArray[np.float64], decisions: int) -> NDArray[np.float64]:
    """Bound the chance that angles are as high, by how far each batch was from the mean of those before it."""
    errors_BX = []
    for b in range(1, len(past_BX) + 1):
        recent_BX = past_BX[max(b - RECENT, 0) : b]
        ahead = now_X if b == len(past_BX) else past_BX[b]
        errors_BX.append((ahead - recent_BX.mean(axis=0)) / math.sqrt(1 + 1 / len(recent_BX)))
    before_BX, last_X = np.stack(errors_BX[:-1]), errors_BX[-1]
    count = len(before_BX)
    deviation_X = np.maximum(before_BX.std(axis=0, ddof=1), 0.5 / math.sqrt(decisions))
    t_X = (last_X - before_BX.mean(axis=0)) / (deviation_X * math.sqrt(1 + 1 / count))
    freedom, t_X = count - 1, np.maximum(t_X, 1e-9)
    # Student's density is at most 0.4 (1 + t^2 / v)^(-(v + 1) / 2), which t / x of bounds in closed form
    bound_X = 0.4 * freedom / ((freedom - 1) * t_X) * (1 + t_X**2 / freedom) ** (-(freedom - 1) / 2)
    return np.minimum(bound_X, 1.0)  # type: ignore[no-any-return]


def _root(blocks: NDArray[np.int64], width: int, num_layers: int, limit: float) -> float:
    """Find the theta above 0 at which the mean of exp(theta * (share - limit)) over blocks is 1, from below."""
    seen = np.flatnonzero(blocks)
    scores = np.append(seen / num_layers, width) - limit * width  # rows of a block add up
    log_weights = np.log(np.append(blocks[seen], UNSEEN) / (blocks.sum() + UNSEEN))
    low, high = 0.0, 1.0
    while _log_mean(log_weights, high * scores) < 0:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_mean(log_weights, middle * scores) < 0 else (low, middle)
    return low


def _log_mean(log_weights: NDArray[np.float64], exponents: NDArray[np.float64]) -> float:
    return float(np.logaddexp.reduce(log_weights + exponents))


def _segments(
    evidence_N: NDArray[np.float64], offsets: NDArray[Any], least_S: NDArray[np.float64]
) -> Iterator[tuple[int, float, slice]]:
    """Give each sequence whose highest sum over a segment is as high as `least_S`, with that sum and segment."""
    # The highest sum that ends at a row is the sum up to it, less the least before. Sums begin lower in each sequence
    # than they ever were, so that one running minimum serves all.
    number_N = np.repeat(np.arange(len(least_S)), np.diff(offsets))
    sums_N1 = np.append(0.0, np.cumsum(evidence_N))
    before_N = sums_N1[:-1] - number_N * (2.0 * len(evidence_N))
    scores_N = sums_N1[1:] - (np.minimum.accumulate(before_N) + number_N * (2.0 * len(evidence_N)))
    for sequence in np.unique(number_N[scores_N >= least_S[number_N]]).tolist():
        start, stop = int(offsets[sequence]), int(offsets[sequence + 1])
        last = start + int(np.argmax(scores_N[start:stop]))
        # the last of equal minima: a segment begins with evidence
        first = last - int(np.argmin(sums_N1[start : last + 1][::-1]))
        yield sequence, float(scores_N[last]), slice(first, last + 1)
