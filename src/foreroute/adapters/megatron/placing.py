"""The routes of one micro-batch as this rank needs them: its rows, its layers, no wider than the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.ranks import Share
from foreroute.errors import BatchMismatchError
from foreroute.layout import Layout, RankRows, fill_padding, take
from foreroute.replay import MissingRows, ReplayRows
from foreroute.replay.rows import is_faithful, refuse_missing
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

PaddingRows = Literal["spread", "native"]
"""Who picks for padding: replay, evenly over expert-parallel ranks and experts ("spread"), or the model ("native")."""

FORCED, REAL, COUNTED = 1, 2, 4
"""Flags of a slot: its picks are forced (it has a route, or is padding that is spread); it is no padding; it is a token
that belongs in the loss under the policy for missing rows."""


@dataclass(frozen=True, eq=False)
class PlacedRoutes:
    """Routes of one micro-batch, cut to the rows and layers of this rank, on the host. Made by `RoutedModel.place`.

    What waits in a queue for its micro-batch waits in this form: per row L · K bytes (twice that above 256 experts),
    one for its flags and four for its token.

    Attributes:
        spec: of the whole model.
        layers: the L routed layers of this rank.
        layout: where the rows of the micro-batch are, before ranks share them.
        ids_LRK: uint8 or uint16 [L, R, K], of the R slots that routers of this rank see; pinned where there is a GPU.
        flags_R: uint8 [R], of these slots: FORCED, REAL and COUNTED.
        versions: weight versions of its rows, ascending.
        is_padded: whether any rank sees padding in this micro-batch.
        tokens_C: int32 [C], tokens of the slots that the model is handed on this rank, sequence parallelism not yet
            applied, in the order of the routers; -1 for padding.
        dropped_C: bool [C], tokens to take out of the loss; None where there are none.
    """

    spec: RoutingSpec
    layers: tuple[RoutedLayer, ...]
    layout: Layout
    ids_LRK: Tensor
    flags_R: NDArray[np.uint8]
    versions: tuple[int, ...]
    is_padded: bool
    tokens_C: NDArray[np.int32]
    dropped_C: NDArray[np.bool_] | None

    def __repr__(self) -> str:
        return f"PlacedRoutes({len(self.flags_R)} slots, {len(self.layers)} layers, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Host memory that it holds, in bytes."""
        dropped = 0 if self.dropped_C is None else self.dropped_C.nbytes
        return self.ids_LRK.nbytes + self.flags_R.nbytes + self.tokens_C.nbytes + dropped

    @property
    def real_R(self) -> NDArray[np.bool_]:
        """Bool [R], False for padding."""
        return self._flagged(REAL)

    @property
    def counted_C(self) -> NDArray[np.bool_]:
        """Bool [C], tokens that belong in the loss; False for padding."""
        real_C = np.asarray(self.tokens_C >= 0)
        return real_C if self.dropped_C is None else real_C & ~self.dropped_C

    def rows(self, layers: Sequence[RoutedLayer], device: torch.device) -> ReplayRows:
        """The rows of some of the layers, on the device. They must follow each other in the order of `self.layers`."""
        first = self.layers.index(layers[0])
        ids_LRK = self.ids_LRK[first : first + len(layers)]
        return ReplayRows.from_host(ids_LRK, self._flagged(FORCED), self.real_R, self._flagged(COUNTED), device)

    def _flagged(self, flag: int) -> NDArray[np.bool_]:
        return np.asarray((self.flags_R & flag) != 0)


def place(
    trace: RoutingTrace,
    layout: Layout,
    share: Share,
    layers: Sequence[RoutedLayer],
    home_LE: NDArray[np.integer],
    *,
    missing: MissingRows = "error",
    padding: PaddingRows = "spread",
    pin: bool = False,
) -> PlacedRoutes:
    """Cut a trace to what one rank replays.

    Args:
        trace: N packed rows.
        layout: where they are in the micro-batch, before ranks share them.
        share: of this rank.
        layers: of this rank; may be none.
        home_LE: integers [L, E], the expert-parallel rank that each expert of these layers lives on.
        missing: what to do with rows that have no route.
        padding: who picks for padding.
        pin: hold the ids in pinned memory.

    Raises:
        BatchMismatchError: when the layout is for other rows, or a row is missing and that is an error.
        LayoutError: when ranks cannot share the layout.
    """
    if layout.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {layout.num_rows} packed rows and the trace has {trace.num_rows}; lay out trace.lengths"
        )
    whole_rows = layout.rows().row_of_slot_R
    if missing == "error":
        refuse_missing(trace, whole_rows)
    context, router = share.of_context(layout).rows().row_of_slot_R, share.of_routers(layout).rows()
    spread_R = router.is_pad_R & (padding == "spread")
    ids_LRK, forced_R = _picks(trace, router, spread_R, share, layers, home_LE)
    counted_R = _counted(trace, router.row_of_slot_R, missing)
    dropped_C = (context >= 0) & ~_counted(trace, context, missing)
    return PlacedRoutes(
        trace.spec,
        tuple(layers),
        layout,
        ids_LRK.pin_memory() if pin else ids_LRK,
        (forced_R * FORCED | ~router.is_pad_R * REAL | counted_R * COUNTED).astype(np.uint8),
        trace.versions,
        bool((whole_rows < 0).any()),
        _tokens(trace, context),
        dropped_C if dropped_C.any() else None,
    )


def _picks(
    trace: RoutingTrace,
    router: RankRows,
    spread_R: NDArray[np.bool_],
    share: Share,
    layers: Sequence[RoutedLayer],
    home_LE: NDArray[np.integer],
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Ids [L, R, K], and bool [R] of the slots that they are forced on."""
    spec = trace.spec
    if not layers:
        return torch.empty((0, len(router), spec.top_k), dtype=torch.uint8), np.zeros(len(router), np.bool_)
    ids_RLK, routed_R = take(trace, router, layers)
    if spread_R.any():
        ids_RLK = fill_padding(ids_RLK, spread_R, home_LE, start=share.number * spec.top_k)
    forced_R = routed_R | spread_R
    ids_RLK[~forced_R] = 0  # nobody gathers there, and E itself would not fit the width of 256 experts
    ids_LRK = np.ascontiguousarray(ids_RLK.transpose(1, 0, 2).astype(spec.id_dtype))
    return torch.from_numpy(ids_LRK), forced_R


def _tokens(trace: RoutingTrace, row_of_slot: NDArray[Any]) -> NDArray[np.int32]:
    if not trace.num_rows:
        return np.full(len(row_of_slot), -1, np.int32)
    return np.where(row_of_slot >= 0, trace.token_ids_N[row_of_slot], np.int32(-1))


def _counted(trace: RoutingTrace, row_of_slot: NDArray[Any], missing: MissingRows) -> NDArray[np.bool_]:
    return is_faithful(trace, row_of_slot) if missing == "drop" else np.asarray(row_of_slot >= 0)
