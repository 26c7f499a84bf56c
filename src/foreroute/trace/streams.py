"""Decisions of a rollout beside its routes: named streams on the same rows. No torch.

    sampling  row p: the tokens that top-p, top-k or min-p had left when token p + 1 was drawn
    indexer   row p: the units of the sequence that a query at p attends to, in each layer with an indexer
    pixels    row p: a digest of the pixels behind the token of an image, which no router decided

A `DecisionStream` has a set of ids for each row, or for each row and layer, and a validity of its own: prompts have
routes and no sampling. Streams go with rows, are joined and compared, become the columns of a file's frames and are
made of them. Traces and their files know nothing else of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, as_mask, whole_number
from foreroute.errors import SpecMismatchError, TraceContentError, shown
from foreroute.trace.checks import as_offsets, ascending, join_ranges, take_ranges
from foreroute.trace.spec import MAX_LAYERS, RoutedLayer, as_layers, layers_from

SAMPLING = "sampling"
"""The stream of sampling masks: ids are tokens, and no layer decides."""
PIXELS = "pixels"
"""The stream of digests of the pixels behind each token of an image, which routes were computed from."""
STREAM_NAME = re.compile(r"[a-z_]{1,32}", re.ASCII)
MOST_CHOICES = MOST_INT32


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
            counts: integers [N] or [N, D], ids of each set; 0 where `valid` is False, and where nothing was left out.
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
        # checked before the cast to 32 bits, which would wrap what is out of range
        if offsets[-1] != len(flat):
            raise TraceContentError(f"the sets have {int(offsets[-1])} ids by their counts, and {len(flat)} are there")
        if flat.size and (flat.min() < 0 or flat.max() >= num_choices):
            raise TraceContentError(f"ids go from {flat.min()} to {flat.max()}; expected 0 to {num_choices - 1}")
        stream = cls(num_choices, valid_N, offsets, _sorted_sets(flat.astype(np.int32), offsets), table)
        stream.check_sets()
        # Engines list a whole vocabulary where nothing was left out. Such a set is the same decision as one without
        # ids, and must compare equal to it.
        whole = np.diff(offsets) == num_choices
        if not whole.any():
            return stream
        kept = stream.ids[~np.repeat(whole, np.diff(offsets))]
        return replace(stream, offsets=as_offsets(np.where(whole, 0, np.diff(offsets))), ids=kept)

    @classmethod
    def from_layers(
        cls,
        num_choices: int,
        valid_N: NDArray[np.bool_],
        sets_of: Sequence[tuple[NDArray[np.int64], NDArray[Any]]],
        layers: tuple[RoutedLayer, ...] = (),
    ) -> DecisionStream:
        """Pack the sets of D layers: of each counts int64 [N], and the ids of all sets joined, ascending in each."""
        counts_ND = np.stack([counts_N for counts_N, _ in sets_of], axis=1)
        offsets = as_offsets(counts_ND.reshape(-1))
        starts_ND = offsets[:-1].reshape(counts_ND.shape)
        joined_ids = np.zeros(int(offsets[-1]), np.int32)
        for d, (counts_N, ids) in enumerate(sets_of):
            joined_ids[join_ranges(starts_ND[:, d], counts_N)] = ids
        stream = cls(num_choices, valid_N, offsets, joined_ids, layers)
        stream.check_sets()
        return stream

    @classmethod
    def absent(cls, num_choices: int, num_rows: int, *, layers: Iterable[RoutedLayer] = ()) -> DecisionStream:
        """Make a stream in which no row has a decision, such as for prompts."""
        num_choices, table = as_choices(num_choices, layers)
        empty = np.zeros(num_rows * max(1, len(table)) + 1, np.int64)
        return cls(num_choices, np.zeros(num_rows, np.bool_), empty, np.zeros(0, np.int32), table)

    def __str__(self) -> str:
        return f"sets of ids below {self.num_choices} in {len(self.layers)} layers"

    @property
    def num_rows(self) -> int:
        """N, the rows, those without a decision included."""
        return len(self.valid_N)

    @property
    def depth(self) -> int:
        """D, the sets of a row, each of which a file has in a frame of its own."""
        return max(1, len(self.layers))

    @property
    def counts_ND(self) -> NDArray[np.int64]:
        """int64 [N, D], the ids of each set."""
        return np.diff(self.offsets).reshape(-1, self.depth)

    @property
    def keys(self) -> NDArray[np.int64]:
        """int64, all ids as one ascending sequence, by which sets are compared: set i has i · `num_choices` added."""
        counts = np.diff(self.offsets)
        return np.repeat(np.arange(len(counts)), counts) * self.num_choices + self.ids

    def contains(self, ids_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say whether the set of each row has the id of `ids_N`, int64 [N], where D = 1: bool [N].

        True for every possible id where nothing was left out, False where nothing was recorded.
        """
        possible = (ids_N >= 0) & (ids_N < self.num_choices)
        wanted, keys = np.arange(self.num_rows) * self.num_choices + np.where(possible, ids_N, 0), self.keys
        found = np.searchsorted(keys, wanted, side="right") - np.searchsorted(keys, wanted, side="left") > 0
        held: NDArray[np.bool_] = self.valid_N & possible & (found | (self.counts_ND[:, 0] == 0))
        return held

    def take(self, rows: NDArray[np.int64]) -> DecisionStream:
        """Return the given rows, in the given order; -1 for a row without a decision."""
        there = rows >= 0  # padding keeps a count of 0, and so no ids
        counts, starts = np.zeros((2, len(rows), self.depth), np.int64)
        sets = rows[there][:, None] * self.depth + np.arange(self.depth)
        starts[there] = self.offsets[sets]
        counts[there] = self.offsets[sets + 1] - self.offsets[sets]
        valid = np.zeros(len(rows), np.bool_)
        valid[there] = self.valid_N[rows[there]]
        ids = take_ranges(self.ids, starts.reshape(-1), counts.reshape(-1))
        return replace(self, valid_N=valid, offsets=as_offsets(counts.reshape(-1)), ids=ids)

    def without(self, rows: NDArray[np.int64]) -> DecisionStream:
        """Return the stream with no decision in the given rows."""
        kept = np.arange(self.num_rows)
        kept[rows] = -1
        return self.take(kept)

    def join(self, others: Sequence[DecisionStream]) -> DecisionStream:
        """Append the rows of streams with the same facts."""
        parts = [self, *others]
        return replace(
            self,
            valid_N=np.concatenate([part.valid_N for part in parts]),
            offsets=as_offsets(np.concatenate([np.diff(part.offsets) for part in parts])),
            ids=np.concatenate([part.ids for part in parts]),
        )

    def facts(self) -> dict[str, Any]:
        """Return choices and layers, for JSON."""
        return {"num_choices": self.num_choices, "layers": [[each.index, each.kind.value] for each in self.layers]}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> DecisionStream:
        """Return a stream without rows from what `facts` returns."""
        if set(facts) != {"num_choices", "layers"}:
            raise TraceContentError(f"a stream of sets has {shown(sorted(facts))}; expected num_choices and layers")
        return cls.absent(facts["num_choices"], 0, layers=layers_from(facts["layers"]))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return validity, offsets and ids."""
        return {"valid_N": self.valid_N, "offsets": self.offsets, "ids": self.ids}

    def check_sets(self) -> None:
        """Raise `TraceContentError` unless the arrays can be those of a stream."""
        ids, offsets = self.ids, self.offsets
        if len(offsets) != self.num_rows * self.depth + 1 or not ascending(offsets, len(ids)):
            raise TraceContentError(f"the offsets of {self.num_rows} rows do not go from 0 to the {len(ids)} ids")
        if self.counts_ND[~self.valid_N].any():
            raise TraceContentError("a row without a decision has ids; expected none there")
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_choices):
            raise TraceContentError(f"ids go from {ids.min()} to {ids.max()}; expected 0 to {self.num_choices - 1}")
        falls = _falls(ids, offsets)
        if falls.any():
            wrong = int(np.argmax(falls))
            row = int(np.searchsorted(offsets, wrong, side="right") - 1) // self.depth
            raise TraceContentError(f"row {row} has id {int(ids[wrong])} twice, or ids that do not ascend")

    def contents(self, start: int, stop: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return columns of a chunk's frames: sizes (0: no decision, n + 1: n ids), and gaps between ids."""
        bounds = self.offsets[start * self.depth : stop * self.depth + 1]
        starts_RD, counts_RD = bounds[:-1].reshape(-1, self.depth), np.diff(bounds).reshape(-1, self.depth)
        contents = []
        for d in range(self.depth):
            counts_R = counts_RD[:, d]
            sizes_R = np.where(self.valid_N[start:stop], counts_R + 1, 0).astype(np.uint32)
            ids = take_ranges(self.ids, starts_RD[:, d], counts_R)
            # Neighbours of different sets have no gap; their differences, which may be negative, are overwritten.
            gaps = np.diff(ids, prepend=np.int32(0)).astype(np.uint32)
            first = (np.cumsum(counts_R) - counts_R)[counts_R > 0]
            gaps[first] = ids[first]
            contents.append((sizes_R, gaps))
        return contents

    def from_contents(self, contents: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> DecisionStream:
        """Return the rows of a chunk from what `contents` returns, and refuse sets that cannot be."""
        sizes_DR, sets_of = [], []
        for sizes_R, gaps in contents:
            counts_R = np.maximum(sizes_R.astype(np.int64) - 1, 0)
            if int(counts_R.sum()) != len(gaps):
                raise TraceContentError(f"sets of {int(counts_R.sum())} ids by their sizes have {len(gaps)}")
            if gaps.max(initial=0) > MOST_CHOICES:
                raise TraceContentError(f"a gap between ids is {gaps.max()}; expected {MOST_CHOICES} at most")
            # the sum of all gaps so far, less that before the set: 2^31 gaps below 2^31 do not wrap
            sums = np.cumsum(gaps, dtype=np.int64)
            before = np.append(0, sums)[np.cumsum(counts_R) - counts_R]
            ids = sums - np.repeat(before, counts_R)
            if ids.max(initial=0) > MOST_CHOICES:
                raise TraceContentError(f"an id is {ids.max()}; expected {MOST_CHOICES} at most")
            sizes_DR.append(sizes_R)
            sets_of.append((counts_R, ids.astype(np.int32)))
        # Validity belongs to the row: a reader of one layer must see the same rows as a reader of another.
        decided_DR = np.stack(sizes_DR) > 0
        if (decided_DR != decided_DR[0]).any():
            raise TraceContentError("a row has a decision in some layers and none in others")
        return self.from_layers(self.num_choices, decided_DR[0], sets_of, self.layers)


def check_name(name: object) -> None:
    """Raise `TraceContentError` unless a stream can have the name."""
    if not (isinstance(name, str) and STREAM_NAME.fullmatch(name)):
        raise TraceContentError(
            f"a stream is named {shown(name)}; expected up to 32 lower-case letters and underscores"
        )


def as_choices(num_choices: int, layers: Iterable[RoutedLayer]) -> tuple[int, tuple[RoutedLayer, ...]]:
    """Return the number of choices and the layers, checked."""
    table = as_layers(layers)
    if len(table) > MAX_LAYERS or len(set(table)) != len(table):
        raise TraceContentError(f"{len(table)} layers decide; expected {MAX_LAYERS} at most, and none twice")
    return whole_number(num_choices, name="num_choices", most=MOST_CHOICES), table


def streams_of_all(
    name: str,  # of the stream
    parts: Sequence[DecisionStream | None],  # that of each trace; one at least is there
    routed_N: Sequence[NDArray[np.bool_]],  # the rows of each trace that have routes. One without any needs no stream
) -> list[DecisionStream]:
    """Return one stream of several traces, with one for each trace that routed no row and has none."""
    first = next(part for part in parts if part is not None)
    # A trace without routes, such as a tool's text, decided nothing and needs no stream to say so.
    whole = []
    for part, routed in zip(parts, routed_N, strict=True):
        if part is None and routed.any():
            raise TraceContentError(
                f"some of the traces have the stream {name} and others do not; record all of them with it, add "
                "DecisionStream.absent where nothing was decided, or take it off with without_streams()"
            )
        whole.append(first.take(np.full(len(routed), -1)) if part is None else part)
        if whole[-1].facts() != first.facts():
            raise SpecMismatchError(
                f"the stream {name} has {whole[-1]}; expected {first}, the same as in the first trace"
            )
    return whole


def _falls(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say of each id whether it is not above the one before it in its set."""
    falls = np.zeros(len(ids), np.bool_)
    falls[1:] = ids[1:] <= ids[:-1]
    falls[offsets[:-1][offsets[:-1] < len(ids)]] = False  # where a set begins
    return falls


def _sorted_sets(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Sort the ids of each set."""
    if not _falls(ids, offsets).any():
        return ids
    of_set = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return ids[np.lexsort((ids, of_set))]
