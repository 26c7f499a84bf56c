"""The routes of one micro-batch as one rank needs them: its rows, its layers, no wider than the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, take
from foreroute.layout.rank_rows import fill_padding
from foreroute.replay.rows import Counts, MissingRows, PaddingRows, ReplayRows, is_faithful, refuse_missing
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

FORCED, REAL, COUNTED = 1, 2, 4
"""Flags of a slot: its picks are forced (it has a route, or they are spread); it is neither padding nor a row whose
picks are spread; it is a token that belongs in the loss under the policy for missing rows."""


@dataclass(frozen=True)
class Share:
    """The place of this rank among those that share the rows of a micro-batch.

    Attributes:
        cp: context-parallel ranks; each sequence is dealt to them in zigzag chunks.
        cp_rank: which of them this is.
        sp: ranks that cut what is left along the sequence: tensor-parallel ranks under sequence parallelism, else 1.
        sp_rank: which of them this is.
        number: tells ranks with different rows apart, and not those with the same.
        cp_group, sp_group: of these ranks; None where one has all.
    """

    cp: int = 1
    cp_rank: int = 0
    sp: int = 1
    sp_rank: int = 0
    number: int = 0
    cp_group: Any = None
    sp_group: Any = None

    @classmethod
    def of(cls, trunk: Any, routers: list[Any]) -> Share:
        """Read off the groups of the routers, or of the model where a stage has none."""
        owner = routers[0] if routers else trunk
        tp, cp, rank = owner.tp_group, owner.cp_group, torch.distributed.get_rank()
        if tp.size() > 1 and trunk.config.sequence_parallel:
            return cls(cp.size(), cp.rank(), tp.size(), tp.rank(), rank, cp, tp)
        return cls(cp.size(), cp.rank(), number=rank // tp.size(), cp_group=cp)

    def of_context(self, layout: Layout, rank: int | None = None) -> Layout:
        """The slots that the model is handed on this context-parallel rank, or on another one.

        Raises:
            LayoutError: when the layout was split already, has batch-first rows, or does not divide.
        """
        if layout.is_split or layout.order == "bshd":
            raise LayoutError(
                f"the layout is {'split already' if layout.is_split else 'batch first'}; give the whole one, packed "
                'or sequence first (pad(..., order="sbhd")): Megatron itself says how ranks share it'
            )
        return layout.split_context(self.cp, self.cp_rank if rank is None else rank)

    def of_routers(self, layout: Layout, context: int | None = None, sequence: int | None = None) -> Layout:
        """The slots that routers see on this rank, or on another one. Raises as `of_context`."""
        part = self.of_context(layout, context)
        return part.split_sequence(self.sp, self.sp_rank if sequence is None else sequence)


@dataclass(frozen=True, eq=False)
class RouteShard:
    """Routes of one micro-batch, cut to the rows and layers of this rank, on the host. Made by `RoutedMegatron.shard`.

    What waits in a queue for its micro-batch waits in this form: per row L · K bytes (twice that above 256 experts),
    one for its flags and four for its token.

    Attributes:
        spec: of the whole model.
        layers: the L routed layers of this rank.
        ids_LRK: uint8 or uint16 [L, R, K], of the R slots that routers of this rank see; pinned where there is a GPU.
        flags_R: uint8 [R], of these slots: FORCED, REAL and COUNTED.
        versions: weight versions of its rows, ascending.
        is_padded: whether any rank sees padding in this micro-batch.
        tokens_C: int32 [C], tokens of the slots that the model is handed on this rank, sequence parallelism not yet
            applied, in the order of the routers; -1 for padding.
        dropped_C: bool [C], tokens to take out of the loss; None where there are none.
        missing: what was done with rows that have no route; "spread" if replay picked for them as for padding.
        padding: who picks for padding.
    """

    spec: RoutingSpec
    layers: tuple[RoutedLayer, ...]
    ids_LRK: Tensor
    flags_R: NDArray[np.uint8]
    versions: tuple[int, ...]
    is_padded: bool
    tokens_C: NDArray[np.int32]
    dropped_C: NDArray[np.bool_] | None
    missing: MissingRows | Literal["spread"]
    padding: PaddingRows

    def __repr__(self) -> str:
        return f"RouteShard({len(self.flags_R)} slots, {len(self.layers)} layers, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Host memory that it holds, in bytes."""
        dropped = 0 if self.dropped_C is None else self.dropped_C.nbytes
        return self.ids_LRK.nbytes + self.flags_R.nbytes + self.tokens_C.nbytes + dropped

    @property
    def is_whole(self) -> bool:
        """Whether every slot, padding too, has a route here, so that nothing is left to the model's routers."""
        return bool(self._flagged(FORCED).all())

    @property
    def num_routed(self) -> int:
        """How many slots have a route."""
        return int(self._flagged(FORCED).sum())

    @cached_property
    def counts_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of the slots that have a route, padding that is spread among them."""
        num_experts = self.spec.num_experts
        forced_LRK = self.ids_LRK.numpy()[:, self._flagged(FORCED)]
        counts = [np.bincount(ids_RK.reshape(-1), minlength=num_experts) for ids_RK in forced_LRK]
        return np.array(counts, np.int64).reshape(len(self.layers), num_experts)

    @property
    def counted_C(self) -> NDArray[np.bool_]:
        """Bool [C], tokens that belong in the loss; False for padding."""
        real_C = np.asarray(self.tokens_C >= 0)
        return real_C if self.dropped_C is None else real_C & ~self.dropped_C

    def rows(
        self,
        layers: Sequence[RoutedLayer],
        device: torch.device,
        *,
        mask_padding: bool = False,
        counts: Counts = "native",
        cells: Any = None,
    ) -> ReplayRows:
        """The rows of some of the layers, on the device. They must follow each other in the order of `self.layers`.

        Args:
            layers: to replay.
            device: where the model is.
            mask_padding: whether statistics leave padding out even where no rank has any.
            counts: which selection is to be counted.
            cells: as `ReplayRows.cells`.
        """
        first = self.layers.index(layers[0])
        here = slice(first, first + len(layers))
        rows = ReplayRows.from_host(
            self.ids_LRK[here],
            self._flagged(FORCED),
            self._flagged(REAL),
            self._flagged(COUNTED),
            device,
            self.spec.num_experts,
            mask_padding=mask_padding or self.is_padded,
            counts=counts,
        )
        return rows if cells is None else replace(rows, cells=cells)

    def _flagged(self, flag: int) -> NDArray[np.bool_]:
        return np.asarray((self.flags_R & flag) != 0)


def shard(
    trace: RoutingTrace,
    layout: Layout,
    share: Share,
    layers: Sequence[RoutedLayer],
    home_LE: NDArray[np.integer],
    *,
    missing: MissingRows | Literal["spread"] = "error",
    padding: PaddingRows = "spread",
    pin: bool = False,
) -> RouteShard:
    """Cut a trace to what one rank replays.

    Args:
        trace: N packed rows.
        layout: where they are in the micro-batch, before ranks share them.
        share: of this rank.
        layers: of this rank; may be none.
        home_LE: integers [L, E], the expert-parallel rank that each expert of these layers lives on.
        missing: as in `RoutedMegatron.shard`, whose errors are raised.
        padding: as there.
        pin: hold the ids in pinned memory.
    """
    if layout.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {layout.num_rows} packed rows and the trace has {trace.num_rows}; lay out trace.lengths"
        )
    whole = layout.rows()
    if missing == "error":
        refuse_missing(trace, whole.row_of_slot_R)
    context_C, router = share.of_context(layout).rows().row_of_slot_R, share.of_routers(layout).rows()
    row_R = router.row_of_slot_R
    filled_R = ~router.is_pad_R & (missing == "spread")
    filled_R[filled_R] = ~trace.valid_N[row_R[filled_R]]
    spread_R = filled_R | (router.is_pad_R & (padding == "spread"))
    num_slots, top_k = len(router), trace.spec.top_k
    ids_LRK, forced_R = torch.empty((0, num_slots, top_k), dtype=torch.uint8), np.zeros(num_slots, np.bool_)
    if layers:
        ids_RLK, routed_R = take(trace, router, layers)
        if spread_R.any():
            ids_RLK = fill_padding(ids_RLK, spread_R, home_LE, start=share.number * top_k)
        forced_R = routed_R | spread_R
        ids_RLK[~forced_R] = 0  # nobody gathers there, and E itself would not fit the width of 256 experts
        ids_LRK = torch.from_numpy(np.ascontiguousarray(ids_RLK.transpose(1, 0, 2).astype(trace.spec.id_dtype)))
    real_R = ~(router.is_pad_R | filled_R)
    counted_R = _counted(trace, row_R, missing) & ~filled_R
    dropped_C = (context_C >= 0) & ~_counted(trace, context_C, missing)
    return RouteShard(
        trace.spec,
        tuple(layers),
        ids_LRK.pin_memory() if pin else ids_LRK,
        (forced_R * FORCED | real_R * REAL | counted_R * COUNTED).astype(np.uint8),
        trace.versions,
        bool(whole.is_pad_R.any() or (missing == "spread" and not trace.valid_N.all())),
        np.append(trace.token_ids_N, np.int32(-1))[context_C],  # padding is row -1
        dropped_C if dropped_C.any() else None,
        missing,
        padding,
    )


def _counted(trace: RoutingTrace, row_of_slot: NDArray[Any], missing: str) -> NDArray[np.bool_]:
    return is_faithful(trace, row_of_slot) if missing == "drop" else np.asarray(row_of_slot >= 0)
