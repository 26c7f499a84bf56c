"""The way back from slots to rows, and what has no way back."""

import numpy as np
import pytest

from foreroute import layout
from foreroute.errors import LayoutError


def test_padding_is_told_from_rows():
    rows = layout.pack([3, 2], align=4).rows()
    assert rows.is_pad_R.tolist() == [False, False, False, True, False, False, True, True]


def test_collect_keeps_the_trailing_shape_and_drops_padding():
    halves = [layout.pack([3], align=4).split_context(2, r).rows() for r in range(2)]
    values = [np.stack([h.row_of_slot_R] * 2, axis=1) * 1.5 for h in halves]
    assert layout.collect(zip(halves, values, strict=True)).tolist() == [[0, 0], [1.5, 1.5], [3, 3]]


def test_collect_refuses_missing_and_repeated_ranks():
    halves = [layout.pack([4]).split_context(2, r).rows() for r in range(2)]
    values = np.zeros(2)
    with pytest.raises(LayoutError, match="row 1 arrived 0 times"):
        layout.collect([(halves[0], values)])
    with pytest.raises(LayoutError, match="row 0 arrived 2 times"):
        layout.collect([(halves[0], values), (halves[1], values), (halves[0], values)])
    with pytest.raises(LayoutError, match="one value per slot"):
        layout.collect([(halves[0], np.zeros(3))])
    with pytest.raises(LayoutError, match="nothing to collect"):
        layout.collect([])
