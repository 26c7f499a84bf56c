"""Rows of small numbers as planes of bytes, which is how a trace file holds them: numpy alone, a few passes.

A plane has one byte of every row: the low bytes of the first number of all rows, then their next bytes, and so on. What
is alike lies side by side, so that zstd sees few kinds of bytes at a time, and finds rows that were there before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_ROWS = 256
"""Rows that are transposed at once. From 128 to 1,024 all are within a tenth of each other, a whole chunk takes twice
as long: it does not fit the second-level cache."""
MOST_NETWORK = 64
"""Numbers of a row up to which a sorting network is used. Its length grows as K log² K; beyond, numpy sorts rows."""


def transposed(values_RX: NDArray[Any]) -> NDArray[Any]:
    """Return rows as columns [X, R], copied tile by tile."""
    rows, columns = values_RX.shape
    target: NDArray[Any] = np.empty((columns, rows), values_RX.dtype)
    for start in range(0, rows, TILE_ROWS):
        target[:, start : start + TILE_ROWS] = values_RX[start : start + TILE_ROWS].T
    return target


def to_bytes(columns: NDArray[Any]) -> NDArray[np.uint8]:
    """Return numbers [..., R] as planes of bytes, uint8 [..., bytes of a number, R], the low bytes first."""
    stored = np.ascontiguousarray(columns, columns.dtype.newbyteorder("<"))
    split = stored.view(np.uint8).reshape(*columns.shape, columns.itemsize)
    return np.ascontiguousarray(split.swapaxes(-1, -2))


def from_bytes(planes: NDArray[np.uint8], dtype: Any, columns: int, rows: int) -> NDArray[Any]:
    """Return the numbers [..., columns, rows] that `to_bytes` made planes of, of uint8 [..., bytes of them all]."""
    stored = np.dtype(dtype).newbyteorder("<")
    shape = (*planes.shape[:-1], columns)
    split = planes.reshape((*shape, stored.itemsize, rows))
    numbers: NDArray[Any] = np.ascontiguousarray(split.swapaxes(-1, -2)).view(stored)
    return numbers.reshape((*shape, rows)).astype(dtype, copy=False)


def sorted_columns(columns_KX: NDArray[Any]) -> list[NDArray[Any]]:
    """Sort along the first axis, and return the K columns of the smallest to the largest numbers.

    A sorting network is a fixed list of exchanges, so that each is done for all rows at once: for K = 8 twenty times as
    fast as sorting row by row. The columns that are given are scratch.
    """
    if len(columns_KX) > MOST_NETWORK:
        return list(np.sort(columns_KX, axis=0))
    columns, spare = list(columns_KX), np.empty_like(columns_KX[0])
    for i, j in _exchanges(len(columns)):
        # The spare column takes the smaller numbers, and the column that it replaces becomes the spare.
        low = np.minimum(columns[i], columns[j], out=spare)
        np.maximum(columns[i], columns[j], out=columns[j])
        columns[i], spare = low, columns[i]
    return columns


@cache
def _exchanges(size: int) -> list[tuple[int, int]]:
    """Batcher's merge exchange for any number of keys: Knuth, The Art of Computer Programming, vol. 3, 5.2.2, M."""
    # p, q, r and d are Knuth's: distances that are halved from pass to pass.
    exchanges = []
    top = 1 << max(0, (size - 1).bit_length() - 1)
    p = top
    while p:
        q, r, d = top, 0, p
        while d:
            exchanges += [(i, i + d) for i in range(size - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    return exchanges
