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
        values_NLK: float32 [N, L, K], finite; 0 where a row was not routed.
    """

    kind: ClassVar[str] = "weights"
    number: ClassVar[np.dtype[Any]] = np.dtype(np.float32)

    valid_N: NDArray[np.bool_]
    values_NLK: NDArray[np.float32]

    @classmethod
    def from_values(cls, values: ArrayLike, valid_N: NDArray[np.bool_]) -> GateWeights:
        """Check weights [N, L, K], and put 0 in the rows that are not routed.

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
            weights = cls(valid_N, np.where(valid_N[:, None, None], given.astype(np.float32), np.float32(0)))
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
        return GateWeights(valid_N, values_NLK)

    def select_layers(self, positions: NDArray[np.int64]) -> GateWeights:
        """Return the weights of the routed layers at these positions."""
        return replace(self, values_NLK=self.values_NLK[:, positions])

    def reorder_picks(self, order_NLK: NDArray[np.int64]) -> GateWeights:
        """Return the weights of the picks of each row and layer in this order."""
        return replace(self, values_NLK=np.take_along_axis(self.values_NLK, order_NLK, axis=-1))

    def join(self, others: Sequence[GateWeights]) -> GateWeights:
        """Append the rows of weights with the same facts."""
        parts = [self, *others]
        return GateWeights(
            np.concatenate([part.valid_N for part in parts]), np.concatenate([part.values_NLK for part in parts])
        )

    def facts(self) -> dict[str, Any]:
        """Return nothing: their layers and picks are those of the routes."""
        return {}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], spec: RoutingSpec) -> GateWeights:
        """Return weights without rows. Raises `TraceContentError` for any facts."""
        if facts:
            raise TraceContentError(f"gate weights have {sorted(facts)!r:.80}; expected no facts of their own")
        return cls(np.zeros(0, np.bool_), np.zeros((0, spec.num_layers, spec.top_k), np.float32))

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
        return [[values_RLK[:, layer].T] for layer in range(self.depth)]

    def frames(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the frames of a chunk that are read with the routed layers at these positions."""
        return positions

    def column_lengths(self, rows: int, count: int) -> list[int]:
        """Return the lengths of the columns that a frame has: K of them.

        What the frame holds must be as long as they are together.
        """
        return [rows] * int(self.values_NLK.shape[2])

    def from_contents(self, contents: Iterable[list[NDArray[Any]]], valid_R: NDArray[np.bool_]) -> GateWeights:
        """Return the rows of a chunk from what `contents` returned for some layers.

        Raises:
            TraceContentError: when a weight is not finite, or stands in a row without a route.
        """
        values_RLK = np.empty((len(valid_R), *self.values_NLK.shape[1:]), np.float32)
        for layer, columns in enumerate(contents):
            values_RLK[:, layer] = np.stack(columns, axis=1)
        weights = GateWeights(valid_R, values_RLK)
        weights.check_finite()
        return weights
