"""From sequence lengths and a parallel layout to the router rows of one rank, step by step.

    pack │ pad  ──▶  split_context  ──▶  split_sequence  ──▶  rows
     THD │ [B, T]     CP, per sequence    SP or Ulysses       RankRows

A router row is a position of the batch as a router sees it, padding included. Until `rows` writes the indices of this
rank, a layout is ranges of router rows: a split costs as much as there are sequences, not as there are rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, whole_number
from foreroute.errors import LayoutError
from foreroute.layout.rank_rows import PAD, RankRows
from foreroute.trace.checks import as_offsets, join_ranges

Side = Literal["left", "right"]
Order = Literal["thd", "bshd", "sbhd"]

MOST_ROUTER_ROWS = 1 << 40
"""Router rows of a layout, and tokens of its sequences. Sums and multiples of this many are exact in 64 bits."""
check_count = partial(whole_number, most=MOST_ROUTER_ROWS, error=LayoutError)


def pack(lengths: ArrayLike, *, align: int = 1, padded_lengths: ArrayLike | None = None) -> Layout:
    """Lay sequences one after the other (THD), each padded on the right.

    Args:
        lengths: integers [S], tokens per sequence of the trace (`trace.lengths`).
        align: the padded length of a sequence is a multiple of this. Over CP x TP ranks, Megatron-Core and Transformer
            Engine need 2·CP·TP.
        padded_lengths: integers [S], where no one multiple says them (the differences of `cu_seqlens_q_padded`);
            rounded up to `align` too.

    Raises:
        LayoutError: for an `align` below 1, negative lengths, or a sequence longer than its padded length.
    """
    length_S = as_lengths(lengths, "lengths")
    check_count(align, name="align")
    count_S = length_S if padded_lengths is None else as_lengths(padded_lengths, "padded_lengths")
    _require(
        count_S.shape == length_S.shape,
        f"got padded_lengths of {count_S.size} sequences; expected those of {len(length_S)}",
    )
    for s in np.flatnonzero(length_S > count_S)[:1]:
        raise LayoutError(f"sequence {s} has {length_S[s]} tokens and {count_S[s]} router rows; give it more")
    count_S = as_lengths(-(-count_S // align) * align, "router rows")
    offsets = as_offsets(length_S)
    return Layout(RowRanges(offsets[:-1], count_S, offsets[:-1], offsets[1:]), "thd", 1, int(offsets[-1]))


def pad(lengths: ArrayLike, *, side: Side, order: Literal["bshd", "sbhd"], to: int | None = None) -> Layout:
    """Lay sequences out as a grid S x T, padded on one side. Side and order have no default: neither can be guessed.

    Args:
        lengths: integers [S], tokens per sequence of the trace (`trace.lengths`).
        side: where the padding is.
        order: how the router's rows are flattened: "bshd" batch first (Hugging Face), "sbhd" sequence first (Megatron).
        to: T; that of the longest sequence by default. Nothing is ever truncated.

    Raises:
        LayoutError: when a sequence is longer than `to`, or an argument is none of the above.
    """
    length_S = as_lengths(lengths, "lengths")
    _require(side in ("left", "right"), f"side is {side!r}; expected 'left' or 'right'")
    _require(order in ("bshd", "sbhd"), f"order is {order!r}; expected 'bshd' (batch first) or 'sbhd' (sequence first)")
    width = int(length_S.max(initial=0)) if to is None else to
    check_count(width, name="to", least=0)
    for s in np.flatnonzero(length_S > width)[:1]:
        raise LayoutError(
            f"sequence {s} has {length_S[s]} tokens and cannot be padded to {width}; "
            "raise `to`, or cut the trace with trace.truncated(lengths)"
        )
    count_S = as_lengths(np.full_like(length_S, width), "router rows")
    offsets = as_offsets(length_S)
    low_S, high_S = offsets[:-1], offsets[1:]
    first_S = low_S if side == "right" else high_S - count_S
    return Layout(RowRanges(first_S, count_S, low_S, high_S), order, len(length_S), int(offsets[-1]))


@dataclass(frozen=True, eq=False)
class Layout:
    """The router rows of one rank, not yet written out. Make one with `pack` or `pad`.

    Attributes:
        ranges: the router rows, as ranges; one per sequence until a split.
        order: "thd", "bshd" or "sbhd".
        num_lines: lines of router rows that a sequence split cuts: 1 when packed, S in a grid.
        num_rows: N, packed rows of the trace.
        is_split: whether ranks already share the router rows.
    """

    ranges: RowRanges
    order: Order
    num_lines: int
    num_rows: int
    is_split: bool = False

    @property
    def num_router_rows(self) -> int:
        """R, the router rows of this rank, padding included."""
        return self.ranges.num_router_rows

    @property
    def line_length(self) -> int:
        """Router rows that a sequence split cuts: all of them when packed, T in a grid."""
        return self.num_router_rows // self.num_lines if self.num_lines else 0

    def align_total(self, multiple: int) -> Layout:
        """Pad the end of a packed line to a multiple of `multiple` router rows (as slime and FP8 kernels do).

        Before `split_context` the tail is shared out like a sequence; after it, every rank pads its own line.
        """
        _require(self.order == "thd", "only a packed line has a total to align; give `pad` a width `to`")
        check_count(multiple, name="multiple")
        if not (tail := -self.line_length % multiple):
            return self
        padding = {"first_J": 0, "count_J": tail, "low_J": 0, "high_J": 0}
        ranges = {name: np.append(of_range, padding[name]) for name, of_range in vars(self.ranges).items()}
        return replace(self, ranges=RowRanges(**ranges))

    def split_context(self, ranks: int, rank: int) -> Layout:
        """Return the share of one of `ranks` context-parallel ranks: chunks r and 2·CP - 1 - r of 2·CP of each
        sequence.

        This "zigzag" of Megatron-Core and Transformer Engine makes causal attention cost every rank the same.

        Raises:
            LayoutError: when a padded sequence does not divide into its chunks, or a split was made before.
        """
        _check_rank(ranks, rank, "context-parallel")
        _require(not self.is_split, "split_context comes before split_sequence, and once: it cuts whole sequences")
        if ranks == 1:
            return self
        chunks = 2 * ranks
        self._check_divides(chunks, ranks)
        chunk_J = self.ranges.count_J // chunks
        near, far = (self.ranges.part(c * chunk_J, chunk_J) for c in (rank, chunks - 1 - rank))
        return replace(self, ranges=near.alternating_with(far), is_split=True)

    def split_sequence(self, ranks: int, rank: int) -> Layout:
        """Return the contiguous share of rank `rank` of `ranks` under sequence parallelism (or Ulysses).

        A packed line is cut as a whole, a grid along T, whatever the order its rows are flattened in.

        Raises:
            LayoutError: when the line does not divide over the ranks.
        """
        _check_rank(ranks, rank, "sequence-parallel")
        _require(
            self.line_length % ranks == 0,
            f"{self.line_length} router rows do not divide over {ranks} sequence-parallel ranks; "
            f"align sequences to a multiple of {ranks}, or the end of a packed line with align_total({ranks})",
        )
        share = self.line_length // ranks
        return replace(self, ranges=self._window(rank * share, (rank + 1) * share), is_split=True)

    def rows(self) -> RankRows:
        """Write the indices of this rank's router rows, in the order in which its routers see them."""
        packed_row = self.ranges.write(self.num_rows)
        if self.order == "sbhd":
            packed_row = packed_row.reshape(self.num_lines, self.line_length).T.reshape(-1)
        return RankRows(packed_row, self.num_rows)

    def _window(self, start: int, stop: int) -> RowRanges:
        """Return the router rows `start : stop` of every line: of each range, what lies in that window."""
        count = self.ranges.count_J
        # lines follow one another and are equally long, so the remainder is where a range begins in its own line
        begin_J = as_offsets(count)[:-1] % max(self.line_length, 1)
        # a range outside of the window keeps 0 router rows
        skip_J = np.clip(start - begin_J, 0, count)
        inside = self.ranges.part(skip_J, np.clip(stop - begin_J, 0, count) - skip_J)
        held = inside.count_J > 0
        return RowRanges(*(of_range[held] for of_range in vars(inside).values()))

    def _check_divides(self, chunks: int, ranks: int) -> None:
        """Refuse sequences that do not divide into chunks of context parallelism."""
        uneven = np.flatnonzero(self.ranges.count_J % chunks)
        if not len(uneven):
            return
        j = int(uneven[0])
        is_tail = self.order == "thd" and self.ranges.low_J[j] == self.ranges.high_J[j]
        step = "align_total" if is_tail else "pack(align=)" if self.order == "thd" else "pad(to=)"
        raise LayoutError(
            f"{'the tail of the line' if is_tail else f'sequence {j} of the batch'} has "
            f"{int(self.ranges.count_J[j])} router rows; context parallelism over {ranks} ranks needs a multiple of "
            f"{chunks}. Give {step} {chunks} or a multiple of it, as the trainer does"
        )


def _check_rank(ranks: int, rank: int, what: str) -> None:
    """Refuse a number of ranks, or a rank, that cannot be."""
    check_count(ranks, name=f"the number of {what} ranks")
    check_count(rank, name=f"{what} rank", least=0, most=ranks - 1)


def _require(holds: bool, message: str) -> None:
    """Raise `LayoutError` with a message unless a condition holds."""
    if not holds:
        raise LayoutError(message)


@dataclass(frozen=True, eq=False)
class RowRanges:
    """J ranges of router rows, one after the other. Router row i of a range sees packed row `first + i`, or is padding.

    sequence owns rows 40 41 42          low = 40, high = 43
    range first = 38, count = 6          router rows: -1 -1 40 41 42 -1
    """

    first_J: NDArray[np.int64]  # [J], the packed row under the first router row of the range, were it not padding
    count_J: NDArray[np.int64]  # [J], router rows in the range
    low_J: NDArray[np.int64]  # [J], first row of the range's sequence
    # [J], row after the last of the range's sequence. `low == high` makes a range of padding
    high_J: NDArray[np.int64]

    @property
    def num_router_rows(self) -> int:
        """R, the router rows of all ranges."""
        return int(self.count_J.sum())

    def part(self, skip_J: NDArray[np.int64] | int, count_J: NDArray[np.int64]) -> RowRanges:
        """Return the `count_J` router rows of each range that follow its first `skip_J`."""
        return RowRanges(self.first_J + skip_J, count_J, self.low_J, self.high_J)

    def alternating_with(self, other: RowRanges) -> RowRanges:
        """Return range 0 of either, then range 1 of either, and so on; both have J ranges."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return RowRanges(*(np.stack(pair, axis=1).reshape(-1) for pair in pairs))

    def write(self, num_rows: int) -> NDArray[Any]:
        """Return the packed row of every router row, int32 or int64 [R], `PAD` where it sees none."""
        # each range is written as if it saw rows throughout; what lies outside of its sequence is overwritten
        dtype = np.dtype(np.int32 if max(num_rows, self.num_router_rows) <= MOST_INT32 else np.int64)
        rows = join_ranges(self.first_J, self.count_J, dtype)
        start_J = as_offsets(self.count_J)[:-1]
        before_J = np.clip(self.low_J - self.first_J, 0, self.count_J)
        after_J = np.clip(self.first_J + self.count_J - self.high_J, 0, self.count_J)
        rows[join_ranges(start_J, before_J)] = PAD
        rows[join_ranges(start_J + self.count_J - after_J, after_J)] = PAD
        return rows


def as_lengths(lengths: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return lengths as int64 [S], unless they are no integers from 0, or more than `MOST_ROUTER_ROWS` in all."""
    given = as_array(lengths, name=name, error=LayoutError)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise LayoutError(f"{name} are {given.dtype} of shape {given.shape}; expected one integer per sequence")
    if given.min(initial=0) < 0:
        raise LayoutError(f"{name}: sequence {int(given.argmin())} has {int(given.min())}; expected 0 or more")
    if int(given.max(initial=0)) * len(given) > MOST_ROUTER_ROWS and sum(given.tolist()) > MOST_ROUTER_ROWS:
        raise LayoutError(f"{name} add up to {sum(given.tolist())}; expected {MOST_ROUTER_ROWS} at most")
    return given.astype(np.int64)
