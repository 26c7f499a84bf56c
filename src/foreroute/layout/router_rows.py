"""From sequence lengths and a parallel layout to the router rows of one rank, step by step.

    pack │ pad  ──▶  split_context  ──▶  split_sequence  ──▶  rows
     THD │ [B, T]     CP, per sequence    SP or Ulysses       RankRows

A router row is a position of the batch as a router sees it, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, whole_number
from foreroute.errors import LayoutError
from foreroute.layout.rank_rows import PAD, RankRows
from foreroute.trace.checks import as_offsets, join_ranges

Side = Literal["left", "right"]
Order = Literal["thd", "bshd", "sbhd"]

MOST_ROUTER_ROWS = MOST_INT32
"""Router rows of a layout, and tokens of its sequences: indices are int32."""
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
    return _lay_out(length_S, count_S, np.zeros_like(length_S), "thd", 1)


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
    before_S = count_S - length_S if side == "left" else np.zeros_like(length_S)
    return _lay_out(length_S, count_S, before_S, order, len(length_S))


def _lay_out(
    length_S: NDArray[np.int64], count_S: NDArray[np.int64], before_S: NDArray[np.int64], order: Order, num_lines: int
) -> Layout:
    """Lay sequences out, each with its router rows, of which some of padding come before its tokens."""
    packed_row_R = np.full(int(count_S.sum()), PAD, np.int32)
    packed_row_R[join_ranges(as_offsets(count_S)[:-1] + before_S, length_S)] = np.arange(length_S.sum())
    return Layout(packed_row_R, count_S, length_S, order, num_lines)


@dataclass(frozen=True, eq=False)
class Layout:
    """The router rows of one rank, line by line. Make one with `pack` or `pad`.

    Attributes:
        packed_row_R: int32 [R], the packed trace row that each router row sees; `PAD` (-1) where it sees none.
        count_J: int64 [J], router rows of each sequence, and of a tail that was aligned.
        length_S: int64 [S], tokens of each sequence.
        order: "thd", "bshd" or "sbhd".
        num_lines: lines of router rows that a sequence split cuts: 1 when packed, S in a grid.
        is_split: whether ranks already share the router rows.
    """

    packed_row_R: NDArray[np.int32]
    count_J: NDArray[np.int64]
    length_S: NDArray[np.int64]
    order: Order
    num_lines: int
    is_split: bool = False

    @property
    def num_rows(self) -> int:
        """N, packed rows of the trace."""
        return int(self.length_S.sum())

    @property
    def num_router_rows(self) -> int:
        """R, the router rows of this rank, padding included."""
        return len(self.packed_row_R)

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
        padded_R = np.append(self.packed_row_R, np.full(tail, PAD, np.int32))
        return replace(self, packed_row_R=padded_R, count_J=np.append(self.count_J, tail))

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
        chunk_J, start_J = self.count_J // chunks, as_offsets(self.count_J)[:-1]
        first_J2 = np.stack([start_J + c * chunk_J for c in (rank, chunks - 1 - rank)], axis=1)
        rows = join_ranges(first_J2.reshape(-1), np.repeat(chunk_J, 2))
        return replace(self, packed_row_R=self.packed_row_R[rows], count_J=2 * chunk_J, is_split=True)

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
        lines = self.packed_row_R.reshape(self.num_lines, self.line_length)
        return replace(self, packed_row_R=lines[:, rank * share : (rank + 1) * share].reshape(-1), is_split=True)

    def rows(self) -> RankRows:
        """Return this rank's router rows in the order in which its routers see them."""
        packed_row_R = self.packed_row_R
        if self.order == "sbhd":
            packed_row_R = packed_row_R.reshape(self.num_lines, self.line_length).T.reshape(-1)
        return RankRows(packed_row_R, self.num_rows)

    def _check_divides(self, chunks: int, ranks: int) -> None:
        """Refuse sequences that do not divide into chunks of context parallelism."""
        uneven = np.flatnonzero(self.count_J % chunks)
        if not len(uneven):
            return
        j = int(uneven[0])
        is_tail = j >= len(self.length_S)
        step = "align_total" if is_tail else "pack(align=)" if self.order == "thd" else "pad(to=)"
        raise LayoutError(
            f"{'the tail of the line' if is_tail else f'sequence {j} of the batch'} has "
            f"{int(self.count_J[j])} router rows; context parallelism over {ranks} ranks needs a multiple of "
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


def as_lengths(lengths: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return lengths as int64 [S], unless they are no integers from 0, or more than `MOST_ROUTER_ROWS` in all."""
    given = as_array(lengths, name=name, error=LayoutError)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise LayoutError(f"{name} are {given.dtype} of shape {given.shape}; expected one integer per sequence")
    if given.min(initial=0) < 0:
        raise LayoutError(f"{name}: sequence {int(given.argmin())} has {int(given.min())}; expected 0 or more")
    if sum(given.tolist()) > MOST_ROUTER_ROWS:  # in Python's integers, which do not wrap
        raise LayoutError(f"{name} add up to {sum(given.tolist())}; expected {MOST_ROUTER_ROWS} at most")
    return given.astype(np.int64)
