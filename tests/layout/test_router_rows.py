"""Corners of layouts, layouts that cannot be, and the way back from router rows to rows."""

import numpy as np
import pytest

from foreroute import layout
from foreroute.errors import LayoutError


def rows_of(planned):
    return planned.rows().packed_row_R.tolist()


def test_nothing_at_all_is_a_layout():
    assert rows_of(layout.pack([])) == []
    assert rows_of(layout.pack([]).align_total(8).split_context(2, 0).split_sequence(2, 1)) == []
    assert rows_of(layout.pad([], side="left", order="sbhd").split_sequence(4, 0)) == []
    assert rows_of(layout.pad([0, 0], side="left", order="sbhd")) == []


@pytest.mark.parametrize(
    ("num_rows", "dtype", "last_two"),
    [
        (2**31 - 1, np.int32, [2**31 - 2, -1]),
        (2**31, np.int64, [2**31 - 2, 2**31 - 1]),
        (2**31 + 2, np.int64, [2**31, 2**31 + 1]),
    ],
)
def test_indices_widen_only_when_rows_need_it(num_rows, dtype, last_two):
    whole = layout.pack([num_rows], align=2)
    ranks = whole.num_router_rows // 2
    far = whole.split_sequence(ranks, ranks - 1).rows()
    assert far.packed_row_R.dtype == dtype
    assert far.packed_row_R.tolist() == last_two


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout.pack([3, -1]), "lengths: sequence 1 has -1"),
        (lambda: layout.pack([3.5]), "expected one integer per sequence"),
        (lambda: layout.pack([3], align=0), "align is 0"),
        (lambda: layout.pack([2**63 - 1, 2**63 - 1, 7]), "lengths add up to"),
        (lambda: layout.pack([3, 3], padded_lengths=[2**63 - 1, 2**62]), "padded_lengths add up to"),
        (lambda: layout.pack([3] * 3, align=2**40), "router rows add up to"),
        (lambda: layout.pad([3], side="top", order="bshd"), "expected 'left' or 'right'"),
        (lambda: layout.pad([3], side="left", order="thd"), "expected 'bshd'"),
        (lambda: layout.pad([3, 9], side="left", order="bshd", to=8), "sequence 1 has 9 tokens"),
        (lambda: layout.pad([3], side="left", order="bshd").align_total(8), "give `pad` a width `to`"),
        (
            lambda: layout.pack([4, 6]).split_context(2, 0),
            "sequence 1 of the batch has 6 router rows.*Give pack.align=. 4",
        ),
        (lambda: layout.pad([6], side="left", order="bshd").split_context(2, 0), "Give pad.to=. 4"),
        (lambda: layout.pack([4]).align_total(6).split_context(2, 0), "the tail of the line has 2 router rows"),
        (
            lambda: layout.pack([4]).split_context(2, 2),
            "context-parallel rank is 2; expected a whole number from 0 to 1",
        ),
        (lambda: layout.pack([8]).split_context(2, 0).split_context(2, 0), "split_context comes before"),
        (lambda: layout.pack([5]).split_sequence(2, 0), "5 router rows do not divide over 2 sequence-parallel ranks"),
    ],
)
def test_impossible_layouts_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_collect_refuses_missing_and_repeated_ranks():
    halves = [layout.pack([4]).split_context(2, r).rows() for r in range(2)]
    values = np.zeros(2)
    with pytest.raises(LayoutError, match="row 1 arrived 0 times"):
        layout.collect([(halves[0], values)])
    with pytest.raises(LayoutError, match="row 0 arrived 2 times"):
        layout.collect([(halves[0], values), (halves[1], values), (halves[0], values)])
    with pytest.raises(LayoutError, match=r"value.*router"):
        layout.collect([(halves[0], np.zeros(3))])
    with pytest.raises(LayoutError, match=r"nothing.*collect"):
        layout.collect([])
