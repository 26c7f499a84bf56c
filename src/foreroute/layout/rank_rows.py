"""The index map of one rank: which packed row each of its router rows sees, the routes there, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import as_array
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.trace import RoutedLayer, RoutingTrace

PAD = -1
"""The packed row of a router row that sees no token."""


@dataclass(frozen=True, eq=False)
class RankRows:
    """The R router rows of one rank, in the order in which its routers see them.

    Attributes:
        packed_row_R: int32 [R], the packed trace row that each router row sees; `PAD` (-1) where it sees none.
        num_rows: N, packed rows of the trace that the indices are for.
    """

    packed_row_R: NDArray[Any]
    num_rows: int

    def __len__(self) -> int:
        """R, padding included."""
        return len(self.packed_row_R)

    @property
    def is_pad_R(self) -> NDArray[np.bool_]:
        """Mark router rows that see no token, bool [R]."""
        return self.packed_row_R < 0


def collect(parts: Iterable[tuple[RankRows, NDArray[Any]]]) -> NDArray[Any]:
    """Put values [R, …] of router rows back into packed rows, [N, …], without those of padding.

    Raises:
        LayoutError: unless every row arrives exactly once. A row that no rank holds has no value, and none is made up.
    """
    given = [(rank_rows, as_array(values, name="values", error=LayoutError)) for rank_rows, values in parts]
    if not given:
        raise LayoutError("there is nothing to collect; pass the router rows and values of at least one rank")
    num_rows = given[0][0].num_rows
    arrivals = np.zeros(num_rows, np.int64)
    values_N = np.empty((num_rows, *given[0][1].shape[1:]), given[0][1].dtype)
    for rank_rows, values_R in given:
        if rank_rows.num_rows != num_rows or len(values_R) != len(rank_rows):
            raise LayoutError(
                f"got {len(values_R)} values for {len(rank_rows)} router rows of {rank_rows.num_rows} packed rows; "
                f"expected one value per router row, of {num_rows} packed rows"
            )
        tokens = np.flatnonzero(~rank_rows.is_pad_R)
        rows = rank_rows.packed_row_R[tokens]
        values_N[rows] = values_R[tokens]
        arrivals += np.bincount(rows, minlength=num_rows)
    if (arrivals != 1).any():
        row = int(np.argmax(arrivals != 1))
        raise LayoutError(
            f"row {row} arrived {int(arrivals[row])} times ({int((arrivals != 1).sum())} of {num_rows} rows did not "
            "arrive once); pass every context and sequence rank once, and no replica of one"
        )
    return values_N


class RankRoutes(NamedTuple):
    """Routes of one rank.

    Attributes:
        ids_RLK: expert ids [R, L of this rank, K]. Where `routed_R` is False every pick is E, one past the last
            expert, so that a reader who forgets the mask meets an index error and not expert 0. uint8 up to 255
            experts, else the next width.
        routed_R: bool [R], False for padding and for tokens without a route.
    """

    ids_RLK: NDArray[Any]
    routed_R: NDArray[np.bool_]


def take_routes(trace: RoutingTrace, rank_rows: RankRows, layers: Sequence[RoutedLayer] | None = None) -> RankRoutes:
    """Return the routes of one rank's router rows and layers; what to do where there is none is the caller's policy.

    Args:
        trace: N packed rows.
        rank_rows: made for sequences of the same lengths.
        layers: the layers of this rank, by name; the whole table by default.

    Raises:
        BatchMismatchError: when the indices are for another number of rows.
        SpecMismatchError: when the trace has no such layer, or layers of other sizes.
    """
    trace.spec.require_alike("a layout of ranks")
    if rank_rows.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {rank_rows.num_rows} packed rows and the trace has {trace.num_rows}; "
            "lay out trace.lengths of this trace, all of them"
        )
    columns = trace.spec.positions(trace.spec.layers if layers is None else layers)
    routed_R = ~rank_rows.is_pad_R
    routed_R[routed_R] = trace.valid_N[rank_rows.packed_row_R[routed_R]]
    num_experts = trace.spec.num_experts
    shape = (len(rank_rows), len(columns), trace.spec.top_k)
    ids_RLK = np.full(shape, num_experts, np.min_scalar_type(num_experts))
    rows = rank_rows.packed_row_R[routed_R]
    ids_RLK[routed_R] = _gather(trace.expert_ids_NLK, rows, columns)
    return RankRoutes(ids_RLK, routed_R)


def fill_padding(
    ids_RLK: NDArray[Any],  # [R, L, K] from `take_routes`
    fill_R: NDArray[np.bool_],  # [R], the router rows to fill, usually `rank_rows.is_pad_R`
    # integers [L, E], the EP rank that hosts each expert (`block_homes(E, G)` for the usual blocks)
    home_LE: NDArray[np.integer],
    *,
    start: int = 0,  # where in the cycle of experts to begin; give ranks different ones so that their first pads differ
) -> NDArray[Any]:
    """Return a copy with legal picks in router rows that a dispatcher must send somewhere, even over ranks and experts.

    In a layer, the loads of two experts differ by at most one, and so do those of ranks that host equally many. Filled
    rows are for the dispatcher alone: keep them out of loss, balance statistics and expert-bias counters.
    """
    num_router_rows, num_layers, top_k = ids_RLK.shape
    num_experts = home_LE.shape[-1]
    if fill_R.shape != (num_router_rows,) or fill_R.dtype != np.bool_:
        raise LayoutError(
            f"the mask is {fill_R.dtype} {fill_R.shape}; expected one bool for each of {num_router_rows} router rows"
        )
    if home_LE.ndim != 2 or len(home_LE) != num_layers or home_LE.dtype.kind not in "iu":
        raise LayoutError(
            f"homes are {home_LE.dtype} {home_LE.shape}; expected integers [{num_layers} layers, experts]"
        )
    if top_k > num_experts:
        raise LayoutError(f"{top_k} distinct picks cannot be made from {num_experts} experts; homes have one each")
    cycle_LE = np.array([_round_robin(home_E) for home_E in home_LE], np.int64).reshape(home_LE.shape)
    step = np.arange(int(fill_R.sum()))[:, None, None] * top_k + np.arange(top_k)
    shift = start + np.arange(num_layers)[:, None] * top_k
    # never zeros: they would send all padding to expert 0, twice
    filled = ids_RLK.copy()
    filled[fill_R] = cycle_LE[np.arange(num_layers)[:, None], (step + shift) % num_experts]
    return filled


def block_homes(num_experts: int, ep_ranks: int) -> NDArray[np.int64]:
    """Return the usual home of each expert, int64 [E]: E / G consecutive experts to a rank."""
    if ep_ranks < 1 or num_experts % ep_ranks:
        raise LayoutError(
            f"{num_experts} experts do not divide over {ep_ranks} ranks; use a number of expert-parallel ranks that "
            "divides the number of experts"
        )
    return np.arange(num_experts) // (num_experts // ep_ranks)


def _round_robin(homes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return every expert once: the first of each rank, then the second of each rank, and so on."""
    by_rank = np.argsort(homes, kind="stable")
    ordered = homes[by_rank]
    nth = np.empty(len(homes), np.int64)
    nth[by_rank] = np.arange(len(homes)) - np.searchsorted(ordered, ordered)
    return np.lexsort((homes, nth))


def _gather(ids_NLK: NDArray[Any], rows: NDArray[Any], columns: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows and layers of routes."""
    # layers of a stage mostly follow one another: then one segment of bytes per row is copied
    if len(columns) and (np.diff(columns) == 1).all():
        part: NDArray[Any] = ids_NLK[:, columns[0] : columns[-1] + 1][rows]
        return part
    gathered: NDArray[Any] = ids_NLK[rows[:, None], columns]
    return gathered
