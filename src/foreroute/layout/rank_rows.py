"""The index map of one rank: which packed row each of its router slots sees, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import LayoutError
from foreroute.layout.runs import PAD


@dataclass(frozen=True, eq=False)
class RankRows:
    """The R router slots of one rank, in the order in which its routers see them.

    Attributes:
        row_of_slot_R: int32 or int64 [R], the packed trace row that each slot sees; `PAD` (-1) where it sees none.
        num_rows: N, packed rows of the trace that the indices are for.
    """

    row_of_slot_R: NDArray[Any]
    num_rows: int

    def __len__(self) -> int:
        """R, padding included."""
        return len(self.row_of_slot_R)

    def __repr__(self) -> str:
        return f"RankRows({len(self)} slots, {int(self.is_pad_R.sum())} padding, of {self.num_rows} rows)"

    @property
    def is_pad_R(self) -> NDArray[np.bool_]:
        """Where a slot sees no token, bool [R]."""
        return self.row_of_slot_R < 0

    def slot_of_row(self) -> NDArray[Any]:
        """The inverse, [N]: the slot that sees each row, -1 where this rank has none.

        Raises:
            LayoutError: when a row stands in two slots, so that there is no inverse.
        """
        slots = np.flatnonzero(~self.is_pad_R)
        rows = self.row_of_slot_R[slots]
        inverse = np.full(self.num_rows, PAD, self.row_of_slot_R.dtype)
        inverse[rows] = slots
        if not np.array_equal(inverse[rows], slots):
            twice = int(rows[inverse[rows] != slots][0])
            raise LayoutError(f"row {twice} stands in two slots; lay out every sequence once to have an inverse")
        return inverse


def collect(parts: Iterable[tuple[RankRows, NDArray[Any]]]) -> NDArray[Any]:
    """Put what the ranks computed back into packed rows: the inverse of laying out.

    Args:
        parts: the slots of each rank and micro-batch, with one value per slot ([R, …], any trailing shape). Values in
            padding slots are dropped.

    Returns:
        values_N: [N, …], one value per packed row.

    Raises:
        LayoutError: unless every row arrives exactly once. A row that no rank holds has no value, and none is made up.
    """
    given = list(parts)
    if not given:
        raise LayoutError("there is nothing to collect; pass the slots and values of at least one rank")
    num_rows = given[0][0].num_rows
    arrivals = np.zeros(num_rows, np.int64)
    values_N = np.empty((num_rows, *given[0][1].shape[1:]), given[0][1].dtype)
    for rank_rows, values_R in given:
        if rank_rows.num_rows != num_rows or len(values_R) != len(rank_rows):
            raise LayoutError(
                f"got {len(values_R)} values for {len(rank_rows)} slots of {rank_rows.num_rows} rows; "
                f"expected one value per slot, of {num_rows} rows"
            )
        slots = np.flatnonzero(~rank_rows.is_pad_R)
        rows = rank_rows.row_of_slot_R[slots]
        values_N[rows] = values_R[slots]
        arrivals += np.bincount(rows, minlength=num_rows)
    if (arrivals != 1).any():
        row = int(np.argmax(arrivals != 1))
        raise LayoutError(
            f"row {row} arrived {int(arrivals[row])} times ({int((arrivals != 1).sum())} of {num_rows} rows did not "
            "arrive once); pass every context and sequence rank of every micro-batch once, and no replica of one"
        )
    return values_N
