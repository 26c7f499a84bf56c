"""Supposed mix-ups: for each kind of defect, the one of its kind that makes two traces agree most.

`TracePair` lays two traces of the same tokens side by side: agreement of any rows under any supposed mix-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import RoutingTrace

# Chosen by hand: they bound the time of a search, and what is not looked for stands in `explain`.
MAX_SAMPLED_ROWS = 1024
MAX_SHIFT = 256
MAX_PERMUTED = 256
MAX_LAYER_OFFSET = 64
MAX_RENAMED = 1024
"""Experts of a layer whose names may be mixed up; a table of pairs of them is made. Ids are compared modulo this where
a first look is enough."""
_QUICK_ROWS, _QUICK_LAYERS = 160, 4
"""What a first look at all shifts takes; the best three are then looked at in full."""


@dataclass(frozen=True)
class Mixup:
    """A defect that was supposed and undone.

    Attributes:
        name: the kind of defect.
        parameters: what exactly was undone.
        total: mean agreement over all sampled routers after it; routers that it cannot restore count 0.
        covered: mean agreement over the routers that it restores.
    """

    name: str
    parameters: Mapping[str, Any]
    total: float
    covered: float


def mixups(pair: TracePair) -> Iterator[Mixup]:
    """The best of each kind, where the kind applies."""
    yield from _shifts(pair)
    yield from _layer_offsets(pair)
    if len(pair.a) > 1:
        yield from _flattenings(pair)
        yield from _slot_permutations(pair)
        yield from _packed_permutations(pair)
    yield from _physical_ids(pair)


def _shifts(pair: TracePair) -> Iterator[Mixup]:
    """Row p of `b` is row p - n of `a`."""
    reach = min(int(pair.a.lengths.max()) - 1, MAX_SHIFT)
    shifts = np.array([n for n in range(-reach, reach + 1) if n], np.int64)
    quick = pair.targets[np.linspace(0, len(pair.targets) - 1, min(_QUICK_ROWS, len(pair.targets))).astype(int)]
    masks_a, masks_b = (
        set_masks(_folded(trace.expert_ids_NLK[:, :_QUICK_LAYERS]), min(trace.spec.num_experts, MAX_RENAMED))
        for trace in (pair.a, pair.b)
    )
    source_XR = _shifted(pair, quick, shifts[:, None])
    # A source of -1 reads the last row here and counts nothing below.
    shared = np.bitwise_count(masks_a[source_XR] & masks_b[quick]).sum(axis=-1)
    covered_XR = (source_XR >= 0) & pair.a.valid_N[source_XR]
    scores = (pair.above_chance(shared).mean(axis=-1) * covered_XR).sum(axis=-1)
    rows = np.arange(pair.a.num_rows)
    for n in shifts[np.argsort(scores)[::-1][:3]]:
        yield _rows_moved(pair, "shift", {"tokens": int(n)}, _shifted(pair, rows, int(n)))


def _folded(ids: NDArray[Any]) -> NDArray[Any]:
    """Ids below `MAX_RENAMED`: the ids themselves of any model that is known."""
    return ids if ids.dtype == np.uint8 else ids % MAX_RENAMED


def _shifted(pair: TracePair, rows: NDArray[np.int64], n: int | NDArray[np.int64]) -> NDArray[np.int64]:
    position = pair.positions[rows] - n
    inside = (position >= 0) & (position < pair.a.lengths[pair.sequences[rows]])
    return np.where(inside, rows - n, -1)


def _layer_offsets(pair: TracePair) -> Iterator[Mixup]:
    """Layer l of `b` is layer l - d of `a`."""
    num_layers = pair.a.spec.num_layers
    rows = pair.targets[pair.a.valid_N[pair.targets]]
    ids_a, ids_b = pair.a.expert_ids_NLK[rows], pair.b.expert_ids_NLK[rows]
    dense_first = pair.a.spec.layers[0].index
    reach = min(num_layers - 1, MAX_LAYER_OFFSET)
    for d in range(-reach, reach + 1):
        if d and len(rows):
            held = slice(max(d, 0), num_layers + min(d, 0))
            origin = slice(max(-d, 0), num_layers - max(d, 0))
            agreed = pair.above_chance(common_picks(ids_a[:, origin], ids_b[:, held]))
            facts = {"layers": d, "dense_first": bool(dense_first) and abs(d) == dense_first}
            yield Mixup("layer-offset", facts, float(agreed.sum() / pair.num_routers), float(agreed.mean()))


def _flattenings(pair: TracePair) -> Iterator[Mixup]:
    """The padded batch [S, T] was flattened one way and read the other way."""
    lengths, offsets, num_sequences = pair.a.lengths, pair.a.offsets, len(pair.a)
    longest = int(lengths.max())
    # Trainers pad to the longest sequence, with or without its last token, or to a multiple that kernels like.
    widths = {longest, longest - 1, *(-(-longest // m) * m for m in (8, 16, 32, 64, 128))} - {0}
    for width in sorted(widths):
        for written in ("batch-first", "sequence-first"):
            if written == "batch-first":
                sequence, position = np.divmod(pair.positions * num_sequences + pair.sequences, width)
            else:
                position, sequence = np.divmod(pair.sequences * width + pair.positions, num_sequences)
            inside = (sequence < num_sequences) & (position < width)
            sequence = np.where(inside, sequence, 0)
            inside &= position < lengths[sequence]
            source = np.where(inside, offsets[sequence] + position, -1)
            read = "sequence-first" if written == "batch-first" else "batch-first"
            yield _rows_moved(pair, "flattening", {"written": written, "read": read, "width": width}, source)


def _slot_permutations(pair: TracePair) -> Iterator[Mixup]:
    """Sequence s of `b` has the rows of sequence `order[s]` of `a`, position by position."""
    num_sequences = len(pair.a)
    if num_sequences > MAX_PERMUTED:
        return
    scores = _pairwise(pair)
    # Ties stay where they are, and near ones too: a permutation must win more than this (chosen by hand).
    scores[np.arange(num_sequences), np.arange(num_sequences)] += 0.02
    order = np.arange(num_sequences)
    # Each turn settles one sequence of either trace, and takes both out of the table.
    for _ in range(num_sequences):  # greedy assignment, surest first
        s, t = np.unravel_index(int(np.argmax(scores)), scores.shape)
        order[s] = t
        scores[s, :], scores[:, t] = -np.inf, -np.inf
    if (order == np.arange(num_sequences)).all():
        return
    from_sequence = order[pair.sequences]
    inside = pair.positions < pair.a.lengths[from_sequence]
    source = np.where(inside, pair.a.offsets[from_sequence] + pair.positions, -1)
    yield _rows_moved(pair, "permutation", {"order": order.tolist(), "packed": False}, source)


def _pairwise(pair: TracePair) -> NDArray[np.float64]:
    """[S, S], agreement of sequence s of `b` with sequence t of `a`, over positions that both have, less where few."""
    longest, spec = int(pair.a.lengths.max()), pair.a.spec
    num_layers, num_experts = min(spec.num_layers, _QUICK_LAYERS), min(spec.num_experts, MAX_RENAMED)
    # Positions that make up to 32,768 entries per sequence: 256 sequences are then 32 MiB of float32 per trace.
    count = max(8, min(64, 32_768 // (num_layers * num_experts)))
    sampled = np.unique(np.linspace(0, longest - 1, count).astype(np.int64))
    present, hot = [], []
    for trace in (pair.a, pair.b):
        rows = trace.offsets[:-1, None] + sampled
        here = sampled < trace.lengths[:, None]
        here &= trace.valid_N[np.where(here, rows, 0)]
        ids = _folded(trace.expert_ids_NLK[np.where(here, rows, 0), :num_layers])
        picked = np.zeros((*here.shape, num_layers, num_experts), np.float32)
        np.put_along_axis(picked, ids.astype(np.int64), 1, axis=-1)
        hot.append((picked * here[..., None, None]).reshape(len(trace), -1))
        present.append(here.astype(np.float32))
    shared = hot[1] @ hot[0].T
    rows_compared = present[1] @ present[0].T
    agreed = pair.above_chance(shared / np.maximum(rows_compared * num_layers, 1))
    # One row that agrees by chance must not beat many that agree: with n rows, agreement counts n / (n + 1).
    return np.where(rows_compared > 0, agreed * rows_compared / (rows_compared + 1), -1.0)


def _packed_permutations(pair: TracePair) -> Iterator[Mixup]:
    """The packed rows of `b` are the sequences of `a` one after the other in another order."""
    if len(pair.a) > MAX_PERMUTED:
        return
    lengths, offsets = pair.a.lengths, pair.a.offsets
    left, order, position = list(range(len(pair.a))), [], 0
    # `position` is the first row of `b` that no chosen sequence covers; the next sequence is the one that fits best
    # there.
    while left:
        gains = [_packed_gain(pair, t, position) for t in left]
        chosen = left.pop(int(np.argmax(gains)))
        order.append(chosen)
        position += int(lengths[chosen])
    if order == list(range(len(pair.a))):
        return
    source = np.concatenate([np.arange(offsets[t], offsets[t + 1]) for t in order])
    yield _rows_moved(pair, "permutation", {"order": order, "packed": True}, source)


def _packed_gain(pair: TracePair, sequence: int, position: int) -> float:
    """How much better than a poor match sequence `sequence` of `a` fits the rows of `b` from `position`."""
    length = int(pair.a.lengths[sequence])
    within = np.unique(np.linspace(0, length - 1, min(length, 32)).astype(np.int64))
    rows_a, rows_b = int(pair.a.offsets[sequence]) + within, position + within
    inside = rows_b < pair.b.num_rows
    rows_a, rows_b = rows_a[inside], rows_b[inside]
    both = pair.a.valid_N[rows_a] & pair.b.valid_N[rows_b]
    agreed = pair.agreement(rows_a[both], rows_b[both], slice(0, _QUICK_LAYERS))
    # Rows of the right sequence agree by 0.8 and more, others hardly: each row counts for or against, so that of two
    # sequences that begin alike the longer fit wins, and a long one that does not fit loses. 0.4 is half way.
    return float((agreed - 0.4).sum())


def _physical_ids(pair: TracePair) -> Iterator[Mixup]:
    """In each layer, expert x of `b` is expert `id_map[x]` of `a`; learnt on half the rows, judged on the others."""
    rows = np.flatnonzero(pair.a.valid_N & pair.b.valid_N)
    if len(rows) < 8 or pair.a.spec.num_experts > MAX_RENAMED:
        return
    # Twice as many rows to learn from as are judged elsewhere, since a rare expert needs some; the other half judges.
    rows = pair.rng.permutation(rows)[: 4 * len(pair.targets)]
    learn, judge = rows[::2], rows[1::2]
    gained = covered = sure = 0.0
    maps = []
    for layer in range(pair.a.spec.num_layers):
        ids_a, ids_b = (trace.expert_ids_NLK[:, layer] for trace in (pair.a, pair.b))
        id_map = _matched_ids(ids_a[learn], ids_b[learn], pair.a.spec.num_experts)
        named = id_map[ids_b[judge]]
        shared = common_picks(ids_a[judge], named)
        as_it_is = common_picks(ids_a[judge], ids_b[judge])
        gained += float((pair.above_chance(shared) - pair.above_chance(as_it_is)).mean())
        sure += float((named >= 0).sum())
        covered += float(shared.sum())
        maps.append(id_map.tolist())
    moved = [sum(x not in (e, -1) for e, x in enumerate(id_map)) for id_map in maps]
    chance = pair.a.spec.top_k / pair.a.spec.num_experts
    mean = (covered / sure - chance) / (1 - chance) if sure else 0.0
    total = pair.before + gained / pair.a.spec.num_layers
    yield Mixup("physical-ids", {"id_map": maps, "moved": moved}, total, mean)


def _matched_ids(ids_a: NDArray[Any], ids_b: NDArray[Any], num_experts: int) -> NDArray[np.int64]:
    """int64 [E], the expert of `a` that goes with each id of `b` most exclusively; -1 for an id never seen."""
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


def _rows_moved(pair: TracePair, name: str, parameters: Mapping[str, Any], source_N: NDArray[np.int64]) -> Mixup:
    return Mixup(name, parameters, pair.total(source_N), pair.covered_mean(source_N))


@dataclass(frozen=True)
class TracePair:
    """Traces `a` and `b` of the same tokens; a supposed mix-up says which row of `a` each row of `b` truly is.

    Agreement is the share of common picks above chance: 1 for equal sets, 0 on average for unrelated ones.
    """

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
        return self.total(np.arange(self.a.num_rows))

    @cached_property
    def num_routers(self) -> int:
        """Sampled rows times layers."""
        return len(self.targets) * self.a.spec.num_layers

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """int64 [N], the position of each row in its sequence."""
        return np.arange(self.a.num_rows) - np.repeat(self.a.offsets[:-1], self.a.lengths)

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """int64 [N], the sequence of each row."""
        return np.repeat(np.arange(len(self.a)), self.a.lengths)

    def total(self, source_N: NDArray[np.int64]) -> float:
        """Mean agreement over the targets if row n of `b` were row `source_N[n]` of `a`; 0 where -1 or absent."""
        source, covered = self._covered(source_N[self.targets])
        if not covered.any():
            return 0.0
        agreed = self.agreement(source[covered], self.targets[covered])
        return float(agreed.sum() / self.num_routers)

    def covered_mean(self, source_N: NDArray[np.int64]) -> float:
        """Mean agreement over the targets that have a source."""
        source, covered = self._covered(source_N[self.targets])
        return float(self.agreement(source[covered], self.targets[covered]).mean()) if covered.any() else 0.0

    def agreement(
        self, rows_a: NDArray[np.int64], rows_b: NDArray[np.int64], layers: slice | NDArray[np.int64] = slice(None)
    ) -> NDArray[np.float64]:
        """[R, layers], agreement of row `rows_a[r]` of `a` with row `rows_b[r]` of `b`."""
        return self.above_chance(
            common_picks(self.a.expert_ids_NLK[rows_a][:, layers], self.b.expert_ids_NLK[rows_b][:, layers])
        )

    def above_chance(self, shared: NDArray[Any]) -> NDArray[np.float64]:
        """Counts of shared picks as agreement."""
        chance = self.a.spec.top_k / self.a.spec.num_experts
        return np.asarray((shared / self.a.spec.top_k - chance) / (1 - chance), np.float64)

    def _covered(self, source: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return source, (source >= 0) & self.a.valid_N[source]


def common_picks(ids_a: NDArray[Any], ids_b: NDArray[Any]) -> NDArray[np.int64]:
    """[...], picks of `ids_a` [..., K] that are also in `ids_b` [..., K]."""
    # One pick after the other: K comparisons of [..., K] take less memory than one of [..., K, K].
    shared = np.zeros(ids_a.shape[:-1], np.int64)
    for k in range(ids_a.shape[-1]):
        shared += (ids_b == ids_a[..., k : k + 1]).any(axis=-1)
    return shared


def set_masks(ids: NDArray[Any], num_experts: int) -> NDArray[np.uint64]:
    """Sets of picks [..., K] as bits, uint64 [..., words of 64 experts]; `a & b` then holds the common picks."""
    word, bit = ids >> 6, np.uint64(1) << (ids & 63).astype(np.uint64)
    masks = np.zeros((*ids.shape[:-1], -(-num_experts // 64)), np.uint64)
    for w in range(masks.shape[-1]):
        masks[..., w] = np.bitwise_or.reduce(np.where(word == w, bit, np.uint64(0)), axis=-1)
    return masks
