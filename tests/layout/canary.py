"""Routes that say where they belong: what proves that rows arrive where they should.

A canary row is a set of K distinct experts, as any row is, so it survives whatever real routes survive: narrowing to
uint8, a file that drops pick order, a router's own checks. Whatever arrives at a router is decoded and names the place
that it was cut from; a shift, a swap or a neighbour's row is seen at once, where random routes look as good as right.

The code is the row's number times L plus its layer, written as the combination of that rank (combinatorial number
system). There are C(E, K) combinations, which bounds how many rows times layers one canary trace holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace import RoutingSpec, RoutingTrace

_LARGEST_CODE = 2**61


def canary_trace(lengths: ArrayLike, spec: RoutingSpec, *, last_absent: bool = True) -> Canary:
    """A trace of sequences of the given lengths in which every route encodes its own place.

    Args:
        lengths: integers [S], tokens per sequence.
        spec: E, K and the layer table; any K from 1 to E - 1, within the capacity.
        last_absent: leave the last token of each sequence without a route, as engines do.

    Raises:
        TraceContentError: when N rows times L layers exceed `canary_capacity(spec)`.
    """
    lengths_S = np.asarray(lengths, dtype=np.int64).reshape(-1)
    needed = int(lengths_S.sum()) * spec.num_layers
    capacity = canary_capacity(spec)
    if needed > capacity:
        raise TraceContentError(
            f"{int(lengths_S.sum())} rows of {spec.num_layers} layers need {needed} codes; {spec.top_k} of "
            f"{spec.num_experts} experts make {capacity}. Use shorter sequences, more experts, or K nearer to E / 2"
        )
    stride = capacity // max(needed, 1)
    ids_NLK = _unrank(np.arange(needed) * stride, spec).reshape(-1, spec.num_layers, spec.top_k)
    rows = np.split(np.arange(len(ids_NLK)), np.cumsum(lengths_S)[:-1]) if len(lengths_S) else []
    routed = [r[:-1] if last_absent else r for r in rows]
    trace = RoutingTrace.from_sequences(spec, rows, [ids_NLK[r] for r in routed], provenance={"source": "canary"})
    return Canary(trace, stride)


def canary_capacity(spec: RoutingSpec) -> int:
    """How many places K picks of E experts tell apart: C(E, K), at most 2 to the 61st."""
    return min(comb(spec.num_experts, spec.top_k), _LARGEST_CODE)


@dataclass(frozen=True, eq=False)
class Canary:
    """A canary trace and the key to read its routes.

    Attributes:
        trace: every token id is the packed number of its row, every route the code of its sample, position and layer.
        stride: distance of two codes. Above 1, most sets of experts are nobody's code, and are recognised as such.
    """

    trace: RoutingTrace
    stride: int

    def decode(self, ids: ArrayLike) -> NDArray[np.int64]:
        """The place that routes were made for.

        Args:
            ids: integers [..., K], in any pick order.

        Returns:
            int64 [..., 3]: sample, position, and number in the layer table; -1 three times where the picks are no code
            of this trace (a repeated pick, an id out of range, another set).
        """
        spec = self.trace.spec
        picks = np.sort(np.asarray(ids, dtype=np.int64), axis=-1)
        known = (picks[..., 0] >= 0) & (picks[..., -1] < spec.num_experts)
        known &= (np.diff(picks, axis=-1) > 0).all(axis=-1)
        code = _rank(np.where(known[..., None], picks, np.arange(spec.top_k)), spec)
        number, rest = np.divmod(code, self.stride)
        row, layer = np.divmod(number, spec.num_layers)
        known &= (rest == 0) & (row < self.trace.num_rows)
        sample = np.searchsorted(self.trace.offsets, np.where(known, row, 0), side="right") - 1
        place = np.stack([sample, row - self.trace.offsets[sample], layer], axis=-1)
        return np.where(known[..., None], place, -1)


def _unrank(codes: NDArray[np.int64], spec: RoutingSpec) -> NDArray[np.int64]:
    """[..., K] distinct ids, ascending: the combination of each rank."""
    ids = np.empty((*codes.shape, spec.top_k), np.int64)
    rest = codes.copy()
    for size in range(spec.top_k, 0, -1):
        table = _binomials(spec, size)
        ids[..., size - 1] = np.searchsorted(table, rest, side="right") - 1
        rest -= table[ids[..., size - 1]]
    return ids


def _rank(picks: NDArray[np.int64], spec: RoutingSpec) -> NDArray[Any]:
    """The rank of ascending picks [..., K]; at least `_LARGEST_CODE` where it would not fit, so never a code."""
    code = np.zeros(picks.shape[:-1], np.int64)
    for size in range(1, spec.top_k + 1):
        code = np.minimum(code + _binomials(spec, size)[picks[..., size - 1]], _LARGEST_CODE)
    return code


def _binomials(spec: RoutingSpec, size: int) -> NDArray[np.int64]:
    """C(c, size) for c = 0 ... E - 1, cut off at `_LARGEST_CODE`; two of them still add up within int64."""
    return np.array([min(comb(c, size), _LARGEST_CODE) for c in range(spec.num_experts)], dtype=np.int64)
