"""Choices of indexers as they travel to a device: in a fifth of the bytes of their ids, read there without a wait.

    units of a set   2 5 6 11      of 16, two low bits of each
    high parts       0 1 1 2       one i stands at place (high part + i)       0 1 2 3 4 5 6 7
                                                                               1 0 1 1 0 1 0 0
    low parts        2 1 2 3       a plane for each bit                        0 1 0 1   1 0 1 1

That is Elias-Fano: K · (1 + l) + V / 2^l bits for K units of V, where l is log2(V / K), rounded down. Below V = 4 K a
set is a row of V bits, which is shorter. That is at most 1.25 of the entropy bound log2 C(V, K) where K is large and V
at least 2 K. How many bits a set takes follows from its position, so that the host knows all sizes, and layers have the
same. Sets stand by descending V: those with a low plane then are the first ones.

Letters: N rows of a trace, M of them that see more units than they choose, H heads, S = M · H sets, K units of each.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import TraceContentError
from foreroute.kernels import BOOL, INT, NONE, ArrayOf, compiled
from foreroute.replay.rows import to_device
from foreroute.trace.indexers import IndexerSpec
from foreroute.trace.streams import DecisionStream

TILE_BITS = 1 << 24
"""Bits that are read at once: each takes about 30 bytes meanwhile."""
_NUMBERS, _IDS, _BYTES = ArrayOf(np.int64, 1), ArrayOf(np.int32, 1), ArrayOf(np.uint8, 1, filled=True)
_encode_sets = compiled("encode_sets", _IDS, *[_NUMBERS] * 4, INT, INT, _BYTES, returns=BOOL)


class CodedChoices:
    """The choices of a trace, which were checked, encoded layer by layer as they are asked for, and then kept.

    Attributes:
        visible_N: int64 [N], the units that each row sees.
        low_S: int32 [S], the low bits of the units of each set.
        row_N: int64 [N], where its sets stand; `NONE` where it has no choice, or chose all that it sees.
    """

    def __init__(self, spec: IndexerSpec, stream: DecisionStream, position_N: NDArray[np.int64]) -> None:
        self.spec, self.stream = spec, stream
        self.visible_N = spec.num_visible(position_N)
        rows = np.flatnonzero(stream.valid_N & (self.visible_N > spec.top_k))
        self._rows_M = rows[np.argsort(-self.visible_N[rows], kind="stable")]
        self.row_N = np.full(len(position_N), NONE)
        self.row_N[self._rows_M] = np.arange(len(rows))
        visible_M = self.visible_N[self._rows_M]
        low_M = np.frexp(visible_M // spec.top_k)[1] - 1
        self._low_M = np.where(low_M < 2, 0, low_M).astype(np.int64)
        # words of 64 bits, which the encoder writes whole
        most_M = (visible_M - 1 >> self._low_M) + np.where(self._low_M > 0, spec.top_k, 1)
        self._high_S1 = np.append(0, np.cumsum(np.repeat(-(-most_M // 64) * 8, spec.heads)))
        self.low_S = np.repeat(self._low_M, spec.heads).astype(np.int32)
        self._set_bytes = -(-spec.top_k // 8)
        self._num_sets_P = (self.low_S > np.arange(self.low_S.max(initial=0))[:, None]).sum(axis=1)
        self._plane_P1 = self._high_S1[-1] + np.append(0, np.cumsum(self._num_sets_P * self._set_bytes))
        self._coded: dict[int, NDArray[np.uint8]] = {}

    @property
    def start_S(self) -> NDArray[np.int64]:
        """int64 [S], the bit where the high parts of each set begin."""
        return 8 * self._high_S1[:-1]

    def encoded(self, indexer: int) -> NDArray[np.uint8]:
        """Return the bytes of all sets of one indexer."""
        if indexer not in self._coded:
            spec, stream = self.spec, self.stream
            coded = np.zeros(int(self._plane_P1[-1]), np.uint8)
            starts_M = stream.offsets[self._rows_M * stream.depth + indexer]
            planes = self._plane_P1[:-1]
            ids, sizes = np.ascontiguousarray(stream.ids), (spec.heads, spec.top_k)
            if not _encode_sets(ids, starts_M, self._low_M, self._high_S1, planes, *sizes, coded):
                raise TraceContentError(
                    f"the choices of {spec.layers[indexer]} are not those that were checked; expected {spec.top_k} "
                    "units of each head, which a query sees. Nobody may write to a trace that is replayed"
                )
            self._coded[indexer] = coded
        return self._coded[indexer]

    def units_SK(self, indexer: int, start_S: Tensor, low_S: Tensor) -> Tensor:
        """Move the sets of one indexer to the device of `start_S` and `low_S`, and list their units, int32 [S, K]."""
        top_k, device = self.spec.top_k, start_S.device
        coded = to_device(self.encoded(indexer), device)
        units_SK = torch.empty((len(start_S), top_k), dtype=torch.int32, device=device)
        every_K = torch.arange(top_k, dtype=torch.int32, device=device)
        tile = max(1, TILE_BITS // (-(-4 * top_k // 64) * 64))  # no set has more words of high bits
        for a in range(0, len(start_S), tile):
            b = min(a + tile, len(start_S))
            begin, end = self._high_S1[[a, b]].tolist()
            is_one = _bits(coded[begin:end])
            place = torch.arange(len(is_one), dtype=torch.int32, device=device)
            # ones to the front, in order, and zeros to the back: nobody asks how many there are, and no two meet
            rank = is_one.cumsum(0, dtype=torch.int32)
            to = torch.where(is_one.bool(), rank - 1, len(place) - 1 - place + rank).long()
            ones = torch.empty_like(place).scatter_(0, to, place)[: (b - a) * top_k].view(b - a, top_k)
            low_T1 = low_S[a:b, None]
            units_TK = ones - (start_S[a:b, None] - 8 * begin).int() - every_K * (low_T1 > 0)
            units_TK = units_TK << low_T1
            for plane, num_sets in enumerate((self._num_sets_P - a).clip(0, b - a).tolist()):
                start = int(self._plane_P1[plane]) + a * self._set_bytes
                bits = _bits(coded[start : start + num_sets * self._set_bytes]).view(-1, 8 * self._set_bytes)[:, :top_k]
                units_TK[:num_sets] |= bits.int() << plane
            units_SK[a:b] = units_TK
        return units_SK


def _bits(coded: Tensor) -> Tensor:
    """uint8, the bits of bytes, the lowest first."""
    eight = torch.arange(8, dtype=torch.uint8, device=coded.device)
    return (coded[:, None] >> eight & 1).view(-1)
