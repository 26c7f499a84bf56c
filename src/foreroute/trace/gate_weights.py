"""Gate weights: the stream that follows the routes, a float for each pick. No torch.

Weight k of a row and layer belongs to pick k. Whatever reorders picks must reorder weights with them: a file of sets
keeps each weight with its expert, though it drops the order of picks. Weights take four times the memory of ids in one
byte, and hardly compress, so that they are recorded on request alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.checks import as_array
from foreroute.trace.spec import RoutingSpec

GATE_WEIGHTS = "gate_weights"
"""The stream of gate weights, the only one of its kind."""


@dataclass(frozen=True, eq=False)
class GateWeights:
    """What each pick was weighted with. Build it with `from_values`; the constructor trusts its arrays.

    Attributes:
        valid_N: bool [N], the routed rows.
        values_NLK: float32 [N, L, K], finite; 0 where a row was not routed, and where a layer has fewer picks than K.
        picks_L: int64 [L], the K of each layer.
    """

    kind: ClassVar[str] = "weights"
    number: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    valid_N: NDArray[np.bool_]
    values_NLK: NDArray[np.float32]
    picks_L: NDArray[np.int64]

    @classmethod
    def from_values(
        cls, values: ArrayLike, valid_N: NDArray[np.bool_], picks_L: NDArray[np.int64] | None = None
    ) -> GateWeights:
        """Check weights [N, L, K], and put 0 in the rows that are not routed.

        Args:
            values: numbers [N, L, K].
            valid_N: bool [N], the routed rows.
            picks_L: int64 [L], `spec.picks_L` of a model whose layers differ in K; what is behind them becomes 0 too.

        Raises:
            TraceContentError: when they are no finite numbers [N, L, K].
        """
        given = as_array(values, name=GATE_WEIGHTS)
        if given.dtype.kind not in "fiu":
            raise TraceContentError(f"gate weights are {given.dtype}; expected numbers")
        if given.ndim != 3 or len(given) != len(valid_N):
            raise TraceContentError(
                f"gate weights have shape {given.shape} for {len(valid_N)} rows; expected [N, L, K]"
            )
        # Weights of rows without a route are whatever the router made of padding: they are no decisions.
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
            values_NLK = np.where(valid_N[:, None, None], given.astype(np.float32), np.float32(0))
        if picks_L is None:
            picks_L = np.full(given.shape[1], given.shape[2])
        elif len(picks_L) == given.shape[1]:
            values_NLK[:, np.arange(given.shape[2]) >= picks_L[:, None]] = 0
        weights = cls(valid_N, values_NLK, picks_L)
        weights.check_finite()
        return weights

    def __str__(self) -> str:
        return "gate weights of {1} layers, {2} of each row".format(*self.values_NLK.shape)

    @property
    def depth(self) -> int:
        """L, the routed layers, each of which a file has in a frame of its own."""
        return int(self.values_NLK.shape[1])

    def take(self, rows: NDArray[np.int64]) -> GateWeights:
        """Return the given rows, in the given order; -1 for one without weights."""
        there = np.flatnonzero(rows >= 0)
        valid_N, values_NLK = (
            np.zeros(len(rows), np.bool_),
            np.zeros((len(rows), *self.values_NLK.shape[1:]), np.float32),
        )
        valid_N[there], values_NLK[there] = self.valid_N[rows[there]], self.values_NLK[rows[there]]
        return GateWeights(valid_N, values_NLK, self.picks_L)

    def select_layers(self, positions: NDArray[np.int64]) -> GateWeights:
        """Return the weights of the routed layers at these positions."""
        picks_L = self.picks_L[positions]
        return replace(self, values_NLK=self.values_NLK[:, positions, : picks_L.max(initial=0)], picks_L=picks_L)

    def reorder_picks(self, order_NLK: NDArray[np.int64]) -> GateWeights:
        """Return the weights of the picks of each row and layer in this order."""
        return replace(self, values_NLK=np.take_along_axis(self.values_NLK, order_NLK, axis=-1))

    def join(self, others: Sequence[GateWeights]) -> GateWeights:
        """Append the rows of weights with the same facts."""
        parts = [self, *others]
        return replace(
            self,
            valid_N=np.concatenate([part.valid_N for part in parts]),
            values_NLK=np.concatenate([part.values_NLK for part in parts]),
        )

    def facts(self) -> dict[str, Any]:
        """Return nothing: their layers and picks are those of the routes."""
        return {}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], spec: RoutingSpec) -> GateWeights:
        """Return weights without rows. Raises `TraceContentError` for any facts."""
        if facts:
            raise TraceContentError(f"gate weights have {sorted(facts)!r:.80}; expected no facts of their own")
        return cls(np.zeros(0, np.bool_), np.zeros((0, spec.num_layers, spec.top_k), np.float32), spec.picks_L)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return validity and weights."""
        return {"valid_N": self.valid_N, "values_NLK": self.values_NLK}

    def check(self, spec: RoutingSpec, valid_N: NDArray[np.bool_]) -> None:
        """Raise `TraceContentError` unless there is a finite weight for each pick of these rows."""
        expected = (len(valid_N), spec.num_layers, spec.top_k)
        if self.values_NLK.shape != expected:
            raise TraceContentError(
                f"gate weights have shape {self.values_NLK.shape}; expected one per pick, {expected}"
            )
        if not np.array_equal(self.picks_L, spec.picks_L) or self.values_NLK[:, ~spec.is_pick_LK].any():
            raise TraceContentError(
                f"gate weights are of {self.picks_L.tolist()[:8]} picks in each layer; expected "
                f"{spec.picks_L.tolist()[:8]}, and 0 behind them. Make them by from_values(..., spec.picks_L)"
            )
        if not np.array_equal(self.valid_N, valid_N):
            raise TraceContentError("gate weights are of other rows than the routes; expected one for each routed pick")
        self.check_finite()

    def check_finite(self) -> None:
        """Raise `TraceContentError` unless all weights are finite, and those of rows without a route 0."""
        if not np.isfinite(self.values_NLK).all():
            raise TraceContentError("gate weights are not all finite; what computed them has diverged")
        if self.values_NLK[~self.valid_N].any():
            raise TraceContentError("a row without a route has gate weights; expected 0 there")

    def contents(self, start: int, stop: int) -> list[list[NDArray[Any]]]:
        """Return the columns of the frames of a chunk of rows: of each routed layer [K, R], pick by pick."""
        values_RLK = self.values_NLK[start:stop]
        return [[values_RLK[:, layer, :top_k].T] for layer, top_k in enumerate(self.picks_L.tolist())]

    def frames(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the frames of a chunk that are read with the routed layers at these positions."""
        return positions

    def column_lengths(self, rows: int, count: int, number: int) -> list[int]:
        """Return the lengths of the columns that a frame has: K of them, of the layer of this number.

        What the frame holds must be as long as they are together.
        """
        return [rows] * int(self.picks_L[number])

    def from_contents(self, contents: Iterable[list[NDArray[Any]]], valid_R: NDArray[np.bool_]) -> GateWeights:
        """Return the rows of a chunk from what `contents` returned for some layers.

        Raises:
            TraceContentError: when a weight is not finite, or stands in a row without a route.
        """
        make = np.empty if self.picks_L.min() == self.picks_L.max() else np.zeros
        values_RLK = make((len(valid_R), *self.values_NLK.shape[1:]), np.float32)
        for layer, columns in enumerate(contents):
            values_RLK[:, layer, : len(columns)] = np.stack(columns, axis=1)
        weights = replace(self, valid_N=valid_R, values_NLK=values_RLK)
        weights.check_finite()
        return weights
