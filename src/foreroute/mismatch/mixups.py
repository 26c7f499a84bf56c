"""Supposed mix-ups: for each defect, the one that makes two traces agree most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import RoutingTrace
from foreroute.trace.operations import shared_picks

# Chosen by hand: they bound the time of a search, and what is not looked for stands in `explain`.
MAX_SAMPLED_ROWS = 1024
MAX_SHIFT = 256
MAX_PERMUTED = 256
MAX_RENAMED = 1024
"""Experts of a layer whose names may be mixed up: a table of pairs is made. Sets of bits take ids modulo this."""
_QUICK_ROWS, _QUICK_LAYERS = 160, 4
"""Rows that a first look at all shifts takes, and layers of every first look; the best are then looked at in full."""
_COMPARED_ROWS, _FITTED_ROWS = 64, 32
"""Rows of a sequence that are compared with those of another, and that say whether it fits a place in packed rows."""


class Defect(StrEnum):
    """Explanation of a difference of two traces."""

    NONE = "none"
    SHIFT = "shift"
    PERMUTATION = "permutation"
    FLATTENING = "flattening"
    LAYER_OFFSET = "layer-offset"
    LAYER_ORDER = "layer-order"
    PHYSICAL_IDS = "physical-ids"
    PREFIX_MISSING = "prefix-missing"
    LAYER_REPLACED = "layer-replaced"
    WEIGHT_VERSION = "weight-version"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Mixup:
    """A defect that was supposed and undone."""

    defect: Defect
    parameters: Mapping[str, Any]  # what exactly was undone
    total: float  # mean agreement over all sampled routers after it; routers that it cannot restore count 0
    covered: float  # mean agreement over the routers that it restores


def mixups(pair: TracePair) -> Iterator[Mixup]:
    """Give the best of each defect, where the defect applies."""
    yield from _shifts(pair)
    yield from _layers_moved(pair)
    if len(pair.a) > 1:
        yield from _flattenings(pair)
        if len(pair.a) <= MAX_PERMUTED:
            yield from _permutations(pair)
            yield from _packed_permutations(pair)
    yield from _physical_ids(pair)


def _shifts(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that row p of `b` is row p - n of `a`."""
    reach = min(int(pair.a.lengths.max()) - 1, MAX_SHIFT)
    shifts = np.array([n for n in range(-reach, reach + 1) if n], np.int64)
    quick = pair.targets[np.linspace(0, len(pair.targets) - 1, min(_QUICK_ROWS, len(pair.targets))).astype(int)]
    agreed, both = pair.first_look(
        _rows_at(pair, pair.sequences[quick], pair.a.positions_N[quick] - shifts[:, None]), quick
    )
    best = np.argsort((agreed * both).sum(axis=-1))[::-1][:3]
    for n in shifts[best].tolist():
        source = _rows_at(pair, pair.sequences, pair.a.positions_N - n)
        yield Mixup(Defect.SHIFT, {"tokens": n}, *pair.agreement_after(source))


def _layers_moved(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that layer l of `b` is layer l - d of `a`, or layer `order[l]`."""
    rows, num_layers = pair.targets[pair.a.valid_N[pair.targets]], pair.a.spec.num_layers
    if not len(rows):
        return
    masks_a, masks_b = (set_masks(trace.expert_ids_NLK[rows], pair.a.spec.num_experts) for trace in (pair.a, pair.b))
    # agreement of each layer of `b`, down, with each of `a`, across; a row of the table at a time bounds the memory
    shared = [np.bitwise_count(masks_a & masks_b[:, at, None]).sum(axis=-1).mean(axis=0) for at in range(num_layers)]
    agreed_LL = pair.above_chance(np.array(shared))
    share_of_rows, dense_first = len(rows) / pair.num_routers, pair.a.spec.layers[0].index
    for d in range(1 - num_layers, num_layers):
        if d:
            agreed = agreed_LL.diagonal(-d)
            facts = {"layers": d, "dense_first": bool(dense_first) and abs(d) == dense_first}
            yield Mixup(Defect.LAYER_OFFSET, facts, float(agreed.sum() * share_of_rows), float(agreed.mean()))
    order = _assigned(agreed_LL)
    if (order == np.arange(num_layers)).all():
        return
    agreed = agreed_LL[np.arange(num_layers), order]
    # Layers that fit nowhere count 0, as those that an offset leaves over; where both explain all, the offset does.
    fit = agreed[agreed > 0.4]
    if len(fit):
        total = float(fit.sum() * share_of_rows) - 1e-6
        yield Mixup(Defect.LAYER_ORDER, {"order": order.tolist()}, total, float(fit.mean()))


def _flattenings(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that the padded batch [S, T] was flattened one way and read the other way."""
    num_sequences, longest = len(pair.a), int(pair.a.lengths.max())
    # Trainers pad to the longest sequence, with or without its last token, or to a multiple that kernels like.
    widths = {longest, longest - 1, *(-(-longest // m) * m for m in (8, 16, 32, 64, 128))} - {0}
    for width in sorted(widths):
        sequence, position = np.divmod(pair.a.positions_N * num_sequences + pair.sequences, width)
        facts = {"written": "batch-first", "read": "sequence-first", "width": width}
        yield Mixup(Defect.FLATTENING, facts, *pair.agreement_after(_rows_at(pair, sequence, position)))
        position, sequence = np.divmod(pair.sequences * width + pair.a.positions_N, num_sequences)
        facts = {"written": "sequence-first", "read": "batch-first", "width": width}
        yield Mixup(Defect.FLATTENING, facts, *pair.agreement_after(_rows_at(pair, sequence, position)))


def _permutations(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that sequence s of `b` has the rows of sequence `order[s]` of `a`, position by position."""
    order = _assigned(_pairwise(pair))
    if (order != np.arange(len(order))).any():
        source = _rows_at(pair, order[pair.sequences], pair.a.positions_N)
        yield Mixup(Defect.PERMUTATION, {"order": order.tolist()}, *pair.agreement_after(source))


def _assigned(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Assign a column to each row of a square table: the surest first, each of them once."""
    in_place = np.arange(len(scores))
    scores = scores.copy()
    # Ties stay where they are, and near ones too: a permutation must win more than this (chosen by hand).
    scores[in_place, in_place] += 0.02
    order = in_place.copy()
    for _ in in_place:
        s, t = np.unravel_index(int(np.argmax(scores)), scores.shape)
        order[s] = t
        scores[s, :], scores[:, t] = -np.inf, -np.inf
    return order


def _pairwise(pair: TracePair) -> NDArray[np.float64]:
    """Return the agreement of each sequence of `b` with each of `a`, [S, S], less where few positions are shared."""
    # The same positions of every sequence, up to the longest, so that any two are compared where both go on.
    sampled = np.unique(np.linspace(0, int(pair.a.lengths.max()) - 1, _COMPARED_ROWS).astype(np.int64))
    rows_SR = np.where(sampled < pair.a.lengths[:, None], pair.a.offsets[:-1, None] + sampled, -1)
    scores = np.empty((len(rows_SR), len(rows_SR)))
    for s, rows_R in enumerate(rows_SR):  # a row of the table at a time bounds the memory
        agreed, both = pair.first_look(rows_SR, rows_R)
        compared = both.sum(axis=-1)
        # One row that agrees by chance must not beat many that agree: with n rows, agreement counts n / (n + 1).
        scores[s] = np.where(compared > 0, (agreed * both).sum(axis=-1) / (compared + 1), -1.0)
    return scores


def _packed_permutations(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that the packed rows of `b` are the sequences of `a` one after the other in another order."""
    lengths, offsets = pair.a.lengths, pair.a.offsets
    # R rows of each sequence; all rows of a short one, some of them twice, of which the second is not looked at
    within_SR = np.linspace(0, lengths - 1, _FITTED_ROWS, axis=1).astype(np.int64)
    looked_at_SR = (np.diff(within_SR, prepend=-1, axis=1) > 0) & (lengths > 0)[:, None]
    rows_SR = np.where(looked_at_SR, offsets[:-1, None] + within_SR, -1)
    left, order, position = np.arange(len(lengths)), [], 0
    # `position` is the first row of `b` that no chosen sequence covers; of those that are left, the one that fits best
    # there is the next.
    while len(left):
        place_SR = position + within_SR[left]
        agreed, both = pair.first_look(rows_SR[left], np.where(place_SR < pair.b.num_rows, place_SR, -1))
        # Rows of the right sequence agree by 0.8 and more, others hardly: each row counts for or against, so that of
        # two sequences that begin alike the longer fit wins, and a long one that does not fit loses. 0.4 is half way.
        chosen = int(np.argmax(((agreed - 0.4) * both).sum(axis=-1)))
        order.append(int(left[chosen]))
        position += int(lengths[left[chosen]])
        left = np.delete(left, chosen)
    if order != list(range(len(lengths))):
        source = np.concatenate([np.arange(offsets[t], offsets[t + 1]) for t in order])
        yield Mixup(Defect.PERMUTATION, {"order": order}, *pair.agreement_after(source))


def _physical_ids(pair: TracePair) -> Iterator[Mixup]:
    """Suppose that expert x of a layer of `b` is expert `id_map[x]` of `a`, as half of the rows teach."""
    rows, spec = np.flatnonzero(pair.a.valid_N & pair.b.valid_N), pair.a.spec
    if len(rows) < 8 or spec.num_experts > MAX_RENAMED:
        return
    # Twice as many rows to learn from as are judged elsewhere, since a rare expert needs some; the other half judges.
    rows = pair.rng.permutation(rows)[: 4 * len(pair.targets)]
    learn, judge = rows[::2], rows[1::2]
    gained = covered = sure = 0.0
    maps = []
    for layer in range(spec.num_layers):
        ids_a, ids_b = (trace.expert_ids_NLK[:, layer] for trace in (pair.a, pair.b))
        id_map = _matched_ids(ids_a[learn], ids_b[learn], spec.num_experts)
        named = id_map[ids_b[judge]]
        shared, as_it_is = shared_picks(ids_a[judge], named), shared_picks(ids_a[judge], ids_b[judge])
        gained += float((pair.above_chance(shared) - pair.above_chance(as_it_is)).mean())
        sure += float((named >= 0).sum())
        covered += float(shared.sum())
        maps.append(id_map.tolist())
    moved = [sum(x not in (e, -1) for e, x in enumerate(id_map)) for id_map in maps]
    mean = float(pair.above_chance(covered / sure * spec.top_k)) if sure else 0.0
    total = pair.before + gained / spec.num_layers
    yield Mixup(Defect.PHYSICAL_IDS, {"id_map": maps, "moved": moved}, total, mean)


def _matched_ids(ids_a: NDArray[Any], ids_b: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    """Return the expert of `a` that goes with each id of `b` most exclusively, int64 [E]; -1 for an id never seen."""
    pairs = ids_b[:, :, None].astype(np.int64) * num_experts + ids_a[:, None, :]
    together = np.bincount(pairs.reshape(-1), minlength=num_experts**2).reshape(num_experts, num_experts)
    seen_b = np.bincount(ids_b.reshape(-1), minlength=num_experts)[:, None]
    seen_a = np.bincount(ids_a.reshape(-1), minlength=num_experts)[None, :]
    rows = len(ids_a)
    # Correlation instead of counts: an expert that is picked often goes together with every id.
    covariance = together - seen_b * seen_a / rows
    # Half a row is added, so that an expert seen in all rows or in none divides by no zero.
    spread = np.sqrt((seen_b * (1 - seen_b / rows) + 0.5) * (seen_a * (1 - seen_a / rows) + 0.5))
    return np.where(seen_b[:, 0] > 0, np.argmax(covariance / spread, axis=1), -1)


def _rows_at(pair: TracePair, sequence_N: NDArray[np.int64], position_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the packed rows at such places, int64 [N]; -1 where there is no such place."""
    sequence = np.where(sequence_N < len(pair.a), sequence_N, 0)
    inside = (sequence_N < len(pair.a)) & (position_N >= 0) & (position_N < pair.a.lengths[sequence])
    return np.where(inside, pair.a.offsets[sequence] + position_N, -1)


@dataclass(frozen=True)
class TracePair:
    """Traces `a` and `b` of the same tokens; a supposed mix-up says which row of `a` each row of `b` truly is."""

    a: RoutingTrace
    b: RoutingTrace
    rng: np.random.Generator

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Up to 1,024 rows that `b` routed, ascending."""
        routed = np.flatnonzero(self.b.valid_N)
        if len(routed) <= MAX_SAMPLED_ROWS:
            return routed
        return np.sort(self.rng.choice(routed, MAX_SAMPLED_ROWS, replace=False))

    @cached_property
    def before(self) -> float:
        """Agreement as the traces are, over the targets; a target that `a` did not route counts 0."""
        return self.agreement_after(np.arange(self.a.num_rows))[0]

    @property
    def num_routers(self) -> int:
        """Sampled rows times layers."""
        return len(self.targets) * self.a.spec.num_layers

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """int64 [N], the sequence of each row."""
        return np.repeat(np.arange(len(self.a)), self.a.lengths)

    @cached_property
    def _quick_masks(self) -> list[NDArray[np.uint64]]:
        """Return the sets of either trace in the layers of a first look, as `set_masks`."""
        return [
            set_masks(trace.expert_ids_NLK[:, :_QUICK_LAYERS], self.a.spec.num_experts) for trace in (self.a, self.b)
        ]

    def first_look(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the agreement of rows of `a` with rows of `b` in a few layers, and whether both were routed."""
        both = (rows_a >= 0) & (rows_b >= 0) & self.a.valid_N[rows_a] & self.b.valid_N[rows_b]
        masks_a, masks_b = self._quick_masks
        shared = np.bitwise_count(masks_a[rows_a] & masks_b[rows_b]).sum(axis=-1)
        return self.above_chance(shared).mean(axis=-1), both

    def agreement_after(self, source_N: NDArray[np.int64]) -> tuple[float, float]:
        """Return the mean agreement, over all targets and those with a source, if row n of `b` were row
        `source_N[n]`.
        """
        source = source_N[self.targets]
        covered = (source >= 0) & self.a.valid_N[source]
        if not covered.any():
            return 0.0, 0.0
        ids_a, ids_b = self.a.expert_ids_NLK[source[covered]], self.b.expert_ids_NLK[self.targets[covered]]
        agreed = self.above_chance(shared_picks(ids_a, ids_b))
        return float(agreed.sum() / self.num_routers), float(agreed.mean())

    def above_chance(self, shared: NDArray[Any] | float) -> NDArray[np.float64]:
        """Return counts of shared picks as agreement: 1 for equal sets, 0 on average for unrelated ones."""
        chance = self.a.spec.top_k / self.a.spec.num_experts
        return np.asarray((shared / self.a.spec.top_k - chance) / (1 - chance), np.float64)


def set_masks(ids: NDArray[Any], num_experts: int) -> NDArray[np.uint64]:
    """Return sets of picks [..., K] as bits, uint64 [..., words of 64 experts]; `a & b` then holds the common picks."""
    # no known model has more experts; of one that had, some would be taken for others
    num_experts = min(num_experts, MAX_RENAMED)
    ids = ids % num_experts if num_experts == MAX_RENAMED else ids
    word, bit = ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64)
    masks = np.zeros((*ids.shape[:-1], -(-num_experts // 64)), np.uint64)
    for w in range(masks.shape[-1]):
        masks[..., w] = np.bitwise_or.reduce(np.where(word == w, bit, np.uint64(0)), axis=-1)
    return masks
