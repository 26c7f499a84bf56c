"""Decisions of a rollout beside its routes: named streams of sets, on the same rows. No torch.

    sampling    row p: the tokens that top-p, top-k or min-p had left when token p + 1 was drawn
    indexer     row p: the units of the sequence that a query at p attends to, in each layer with an indexer

A stream has the rows of its trace and a validity of its own: prompts have routes and no sampling. Its sets are ragged:
they lie one behind the other, row by row and within a row layer by layer. A recorded set without ids left nothing out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import SpecMismatchError, TraceContentError
from foreroute.trace.checks import as_array, as_mask, as_offsets, ascending, take_ranges
from foreroute.trace.spec import MAX_LAYERS, RoutedLayer, as_layers, whole_number

SAMPLING = "sampling"
"""The stream of sampling masks: ids are tokens, and no layer decides."""
MOST_CHOICES = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class DecisionStream:
    """A set of ids for each row and each of D layers that decide. In memory: 4 bytes per id and 8 per set.

    Build one with `from_sets`; the constructor trusts its arrays.

    Attributes:
        num_choices: ids are below it, 1 to 2^31 - 1: the size of the vocabulary, for sampling masks.
        valid_N: bool [N], False where no decision was recorded.
        offsets: int64 [N · D + 1]; row n and layer d have `ids[offsets[n · D + d] : offsets[n · D + d + 1]]`.
        ids: int32, ascending in each set. A set of a valid row that has none left nothing out.
        layers: the D layers that decide; empty for a decision of the whole model, and D is then 1.
    """

    num_choices: int
    valid_N: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    layers: tuple[RoutedLayer, ...] = ()

    def __post_init__(self) -> None:
        num_choices, layers = as_choices(self.num_choices, self.layers)
        object.__setattr__(self, "num_choices", num_choices)
        object.__setattr__(self, "layers", layers)

    @classmethod
    def from_sets(
        cls,
        num_choices: int,
        valid: ArrayLike,
        counts: ArrayLike,
        ids: ArrayLike,
        *,
        layers: Iterable[RoutedLayer] = (),
    ) -> DecisionStream:
        """Check sets and pack them. One of all choices is kept as one without ids: it left nothing out.

        Args:
            num_choices: ids are below it.
            valid: bool [N], False where nothing was recorded.
            counts: integers [N] or [N, D], ids of each set; 0 where `valid` is False, and for a set that left nothing
                out.
            ids: integers, those of all sets joined; each set in any order.
            layers: the D layers that decide, if any.

        Raises:
            TraceContentError: for an id out of range or twice in a set, or shapes that disagree.
        """
        num_choices, table = as_choices(num_choices, layers)
        valid_N = as_mask(valid, name="valid")
        counts_ND, flat = as_array(counts, name="counts"), as_array(ids, name="ids")
        depth = max(1, len(table))
        shapes = ((len(valid_N),), (len(valid_N), depth)) if depth == 1 else ((len(valid_N), depth),)
        integers = all(given.dtype.kind in "iu" or not given.size for given in (counts_ND, flat))
        if valid_N.ndim != 1 or counts_ND.shape not in shapes or flat.ndim != 1 or not integers:
            raise TraceContentError(
                f"got {counts_ND.dtype} counts of shape {counts_ND.shape} and {flat.dtype} ids of shape {flat.shape} "
                f"for {len(valid_N)} rows; expected integer counts [{len(valid_N)}, {depth}], and the ids of all sets "
                "joined"
            )
        offsets = as_offsets(counts_ND.astype(np.int64).reshape(-1))
        if offsets[-1] != len(flat):
            raise TraceContentError(f"the sets have {int(offsets[-1])} ids by their counts, and {len(flat)} are there")
        if flat.size and (flat.min() < 0 or flat.max() >= num_choices):
            raise TraceContentError(f"ids go from {flat.min()} to {flat.max()}; expected 0 to {num_choices - 1}")
        stream = cls(num_choices, valid_N, offsets, _sorted_sets(flat.astype(np.int32), offsets), table)
        stream.check()
        whole = np.diff(offsets) == num_choices
        if not whole.any():
            return stream
        kept = stream.ids[~np.repeat(whole, np.diff(offsets))]
        return replace(stream, offsets=as_offsets(np.where(whole, 0, np.diff(offsets))), ids=kept)

    @classmethod
    def absent(cls, num_choices: int, num_rows: int, *, layers: Iterable[RoutedLayer] = ()) -> DecisionStream:
        """Make a stream in which no row has a decision, such as for prompts."""
        num_choices, table = as_choices(num_choices, layers)
        empty = np.zeros(num_rows * max(1, len(table)) + 1, np.int64)
        return cls(num_choices, np.zeros(num_rows, np.bool_), empty, np.zeros(0, np.int32), table)

    @property
    def depth(self) -> int:
        """D, the sets of a row."""
        return max(1, len(self.layers))

    @property
    def num_rows(self) -> int:
        """N, the rows, those without a decision included."""
        return len(self.valid_N)

    @property
    def counts_ND(self) -> NDArray[np.int64]:
        """int64 [N, D], the ids of each set."""
        return np.diff(self.offsets).reshape(-1, self.depth)

    def contain(self, ids_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say whether the set of each row has an id, such as that of its sampled token. For streams with D = 1.

        Args:
            ids_N: int64 [N], one id for each row.

        Returns:
            bool [N]: True for every possible id where nothing was left out, False where nothing was recorded.
        """
        counts = np.diff(self.offsets)
        possible = (ids_N >= 0) & (ids_N < self.num_choices)
        # sets ascend, and so do the ids of all sets when those of each begin where the set before has ended
        keys = np.repeat(np.arange(self.num_rows), counts) * self.num_choices + self.ids
        wanted = np.arange(self.num_rows) * self.num_choices + np.where(possible, ids_N, 0)
        found = np.searchsorted(keys, wanted, side="right") - np.searchsorted(keys, wanted, side="left") > 0
        held: NDArray[np.bool_] = self.valid_N & possible & (found | (counts == 0))
        return held

    def take(self, rows: NDArray[np.int64]) -> DecisionStream:
        """Return the given rows, in the given order: how every layout moves a stream.

        Args:
            rows: int64 [N'], from 0 to N - 1, or -1 for a row without a decision, such as padding.
        """
        there = rows >= 0
        starts_ND = self.offsets[:-1].reshape(-1, self.depth)
        if there.all():
            counts, starts = self.counts_ND[rows], starts_ND[rows]
        else:
            counts, starts = np.zeros((2, len(rows), self.depth), np.int64)
            counts[there], starts[there] = self.counts_ND[rows[there]], starts_ND[rows[there]]
        valid = np.zeros(len(rows), np.bool_)
        valid[there] = self.valid_N[rows[there]]
        ids = take_ranges(self.ids, starts.reshape(-1), counts.reshape(-1))
        return replace(self, valid_N=valid, offsets=as_offsets(counts.reshape(-1)), ids=ids)

    def without(self, rows: NDArray[np.int64]) -> DecisionStream:
        """Return the stream with no decision in the given rows."""
        kept = np.arange(self.num_rows)
        kept[rows] = -1
        return self.take(kept)

    def equals(self, other: DecisionStream) -> bool:
        """Say whether all is the same."""
        return (self.num_choices, self.layers) == (other.num_choices, other.layers) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("valid_N", "offsets", "ids")
        )

    def digest(self) -> str:
        """Return BLAKE2b-128 over choices, layers, validity and sets, as hex."""
        state = hashlib.blake2b(digest_size=16)
        state.update(json.dumps([self.num_choices, [[layer.index, layer.kind] for layer in self.layers]]).encode())
        for array in (self.valid_N, self.offsets, self.ids):
            state.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        return state.hexdigest()

    def check(self) -> None:
        """Raise `TraceContentError` unless the arrays can be those of a stream."""
        ids, offsets = self.ids, self.offsets
        if len(offsets) != self.num_rows * self.depth + 1 or not ascending(offsets, len(ids)):
            raise TraceContentError(f"the offsets of {self.num_rows} rows do not go from 0 to the {len(ids)} ids")
        if self.counts_ND[~self.valid_N].any():
            raise TraceContentError("a row without a decision has ids; expected none there")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_choices):
            raise TraceContentError(f"ids go from {ids.min()} to {ids.max()}; expected 0 to {self.num_choices - 1}")
        rises = np.ones(len(ids), np.bool_)
        rises[1:] = ids[1:] > ids[:-1]
        rises[offsets[:-1][offsets[:-1] < len(ids)]] = True  # where a set begins
        if not rises.all():
            wrong = int(np.argmin(rises))
            row = int(np.searchsorted(offsets, wrong, side="right") - 1) // self.depth
            raise TraceContentError(f"row {row} has id {int(ids[wrong])} twice, or ids that do not ascend")


def as_choices(num_choices: int, layers: Iterable[RoutedLayer]) -> tuple[int, tuple[RoutedLayer, ...]]:
    """Return so many choices, and such layers. Raises `TraceContentError` when there cannot be these."""
    table = as_layers(layers)
    if len(table) > MAX_LAYERS or len(set(table)) != len(table):
        raise TraceContentError(f"{len(table)} layers decide; expected {MAX_LAYERS} at most, and none twice")
    return whole_number(num_choices, name="num_choices", most=MOST_CHOICES), table


def joined(name: str, parts: Sequence[DecisionStream | None], routed_N: Sequence[NDArray[np.bool_]]) -> DecisionStream:
    """Join the rows of one stream of several traces.

    Args:
        name: of the stream.
        parts: that of each trace; None where it has none. One at least is there.
        routed_N: the rows of each trace that have routes. One without any needs no stream.

    Raises:
        TraceContentError: when a trace has routes and no such stream.
        SpecMismatchError: when the streams are not of one model.
    """
    first = next(part for part in parts if part is not None)
    whole = []
    for part, routed in zip(parts, routed_N, strict=True):
        if part is None and routed.any():
            raise TraceContentError(
                f"some of the traces have the stream {name} and others do not; record all of them with it, add "
                "DecisionStream.absent where nothing was decided, or take it off with without_streams()"
            )
        whole.append(first.take(np.full(len(routed), -1)) if part is None else part)
        if (whole[-1].num_choices, whole[-1].layers) != (first.num_choices, first.layers):
            raise SpecMismatchError(
                f"the stream {name} has {whole[-1].num_choices} choices in {len(whole[-1].layers)} layers; expected "
                f"{first.num_choices} in the same {len(first.layers)}, as in the first trace"
            )
    counts = np.concatenate([np.diff(part.offsets) for part in whole])
    return replace(
        first,
        valid_N=np.concatenate([part.valid_N for part in whole]),
        offsets=as_offsets(counts),
        ids=np.concatenate([part.ids for part in whole]),
    )


def same_streams(a: Mapping[str, DecisionStream], b: Mapping[str, DecisionStream]) -> bool:
    """Say whether two traces have the same streams."""
    return set(a) == set(b) and all(stream.equals(b[name]) for name, stream in a.items())


def common_rows(stream: DecisionStream, first_a: int, first_b: int, length: int) -> int:
    """Count the rows from two rows on, up to `length`, in which a stream is the same."""
    depth, ids = stream.depth, stream.ids
    bounds_a = stream.offsets[first_a * depth : (first_a + length) * depth + 1]
    bounds_b = stream.offsets[first_b * depth : (first_b + length) * depth + 1]
    differs = stream.valid_N[first_a : first_a + length] != stream.valid_N[first_b : first_b + length]
    differs |= (np.diff(bounds_a) != np.diff(bounds_b)).reshape(-1, depth).any(axis=1)
    length = int(differs.argmax()) if differs.any() else length
    start_a, start_b, size = int(bounds_a[0]), int(bounds_b[0]), int(bounds_a[length * depth] - bounds_a[0])
    other = np.flatnonzero(ids[start_a : start_a + size] != ids[start_b : start_b + size])
    return length if not len(other) else (int(np.searchsorted(bounds_a, start_a + other[0], side="right")) - 1) // depth


def _sorted_sets(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    rises = np.ones(len(ids), np.bool_)
    rises[1:] = ids[1:] >= ids[:-1]
    rises[offsets[:-1][offsets[:-1] < len(ids)]] = True
    if rises.all():
        return ids
    of_set = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return ids[np.lexsort((ids, of_set))]
