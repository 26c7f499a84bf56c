"""Ranges of consecutive router slots: what a layout is made of until its indices are written out.

Every packing, padding and split of token rows is a list of ranges. In a range, slot i sees packed row `first + i`, or
is padding where that row falls outside of the range's own sequence, `low` to `high`:

    sequence owns rows 40 41 42          low = 40, high = 43
    range first = 38, count = 6            slots:  -1 -1 40 41 42 -1

A part of a range is a range, so splitting costs as much as there are sequences, and only `write` costs as much as there
are slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import LayoutError
from foreroute.trace.checks import as_offsets, join_ranges

PAD = -1
"""The row of a slot that sees no token."""

_INT32_ROWS = 2**31 - 1
MOST_ROUTER_SLOTS = 1 << 40
"""Router slots of a layout, and tokens of its sequences. Sums and multiples of so many are exact in 64 bits."""


@dataclass(frozen=True, eq=False)
class SlotRanges:
    """J ranges of slots, one after the other.

    Attributes:
        first_J: int64 [J], the packed row under the first slot of the range, were it not padding.
        count_J: int64 [J], slots in the range.
        low_J: int64 [J], first row of the range's sequence.
        high_J: int64 [J], row after the last of the range's sequence. `low == high` makes a range of padding.
    """

    first_J: NDArray[np.int64]
    count_J: NDArray[np.int64]
    low_J: NDArray[np.int64]
    high_J: NDArray[np.int64]

    @property
    def num_slots(self) -> int:
        """R, the slots of all ranges."""
        return int(self.count_J.sum())

    def part(self, skip_J: NDArray[np.int64] | int, count_J: NDArray[np.int64]) -> SlotRanges:
        """The `count_J` slots of each range that follow its first `skip_J`."""
        return SlotRanges(self.first_J + skip_J, count_J, self.low_J, self.high_J)

    def nonempty(self) -> SlotRanges:
        """The ranges that have slots."""
        held = self.count_J > 0
        return SlotRanges(self.first_J[held], self.count_J[held], self.low_J[held], self.high_J[held])

    def write(self, num_rows: int) -> NDArray[Any]:
        """The row of every slot, `PAD` where it sees none.

        Args:
            num_rows: N, of the packed rows that the ranges index.

        Returns:
            row_of_slot_R: int32 [R] where rows and slots can be counted in it, else int64 [R].
        """
        # each range is written as if it saw rows throughout; what lies outside of its sequence is overwritten
        dtype = np.dtype(np.int32 if max(num_rows, self.num_slots) <= _INT32_ROWS else np.int64)
        rows = join_ranges(self.first_J, self.count_J, dtype)
        start_J = as_offsets(self.count_J)[:-1]
        before_J = np.clip(self.low_J - self.first_J, 0, self.count_J)
        after_J = np.clip(self.first_J + self.count_J - self.high_J, 0, self.count_J)
        rows[join_ranges(start_J, before_J)] = PAD
        rows[join_ranges(start_J + self.count_J - after_J, after_J)] = PAD
        return rows


def as_lengths(lengths: ArrayLike, name: str) -> NDArray[np.int64]:
    """`lengths` as int64 [S].

    Raises:
        LayoutError: unless they are integers from 0, `MOST_ROUTER_SLOTS` in all at most.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise LayoutError(f"{name} are {given.dtype} of shape {given.shape}; expected one integer per sequence")
    if given.min(initial=0) < 0:
        raise LayoutError(f"{name}: sequence {int(given.argmin())} has {int(given.min())}; expected 0 or more")
    if int(given.max(initial=0)) * len(given) > MOST_ROUTER_SLOTS and sum(given.tolist()) > MOST_ROUTER_SLOTS:
        raise LayoutError(f"{name} add up to {sum(given.tolist())}; expected {MOST_ROUTER_SLOTS} at most")
    return given.astype(np.int64)


def padding_ranges(count_J: NDArray[np.int64]) -> SlotRanges:
    """Ranges of nothing but padding."""
    zeros = np.zeros_like(count_J)
    return SlotRanges(zeros, count_J, zeros, zeros)


def interleave(parts: list[SlotRanges]) -> SlotRanges:
    """Range j of every part, for j = 0, 1, …; the parts have equally many ranges."""
    return SlotRanges(
        np.stack([p.first_J for p in parts], axis=1).reshape(-1),
        np.stack([p.count_J for p in parts], axis=1).reshape(-1),
        np.stack([p.low_J for p in parts], axis=1).reshape(-1),
        np.stack([p.high_J for p in parts], axis=1).reshape(-1),
    )
