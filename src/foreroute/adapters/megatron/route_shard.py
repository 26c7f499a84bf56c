"""The routes of one micro-batch as one rank needs them: a trace cut to its rows and layers, and where they are.

Letters: R rows that routers of this rank see, C rows that the model is handed on it before sequence parallelism cuts
them, N rows of the cut trace, L layers of this rank, K picks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.errors import LayoutError
from foreroute.layout import Layout
from foreroute.replay.rows import (
    NATIVE,
    SPREAD,
    Counts,
    MissingRows,
    PaddingRows,
    Policy,
    ReplayRows,
    TraceOnDevice,
    faithful_rows,
    refuse_missing,
    spread_picks,
)
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace


@dataclass(frozen=True)
class Share:
    """How the rows of a micro-batch are shared by context-parallel ranks, and by those that cut what these are left."""

    cp: int = 1  # each sequence is dealt to these ranks in zigzag chunks
    cp_rank: int = 0
    sp: int = 1  # tensor-parallel ranks under sequence parallelism, else 1
    sp_rank: int = 0
    number: int = 0  # tells ranks with different rows apart, and not those with the same
    cp_group: Any = None  # None where one rank has all
    sp_group: Any = None

    @classmethod
    def of(cls, trunk: Any, routers: list[Any]) -> Share:
        """Read the groups of the routers, or of the model where a stage has none."""
        owner = routers[0] if routers else trunk
        tp, cp, rank = owner.tp_group, owner.cp_group, torch.distributed.get_rank()
        if tp.size() > 1 and trunk.config.sequence_parallel:
            return cls(cp.size(), cp.rank(), tp.size(), tp.rank(), rank, cp, tp)
        return cls(cp.size(), cp.rank(), number=rank // tp.size(), cp_group=cp)

    def of_context(self, layout: Layout, rank: int | None = None) -> Layout:
        """Lay out what the model is handed on this context-parallel rank, or on another one."""
        if layout.is_split or layout.order == "bshd":
            raise LayoutError(
                f"the layout is {'split already' if layout.is_split else 'batch first'}; give the whole one, packed "
                'or sequence first (pad(..., order="sbhd")): Megatron itself says how ranks share it'
            )
        return layout.split_context(self.cp, self.cp_rank if rank is None else rank)

    def of_routers(self, layout: Layout, context: int | None = None, sequence: int | None = None) -> Layout:
        """Lay out what routers see on this rank, or on another one."""
        part = self.of_context(layout, context)
        return part.split_sequence(self.sp, self.sp_rank if sequence is None else sequence)


@dataclass(frozen=True, eq=False)
class RouteShard:
    """Routes of one micro-batch, cut to the rows and layers of this rank. Made by `RoutedMegatron.shard`.

    What waits in a queue for its micro-batch waits in this form, on the host: per row L · K bytes (twice that above 256
    experts) and 9 more, two more still where tokens are taken out of the loss. What passes need of it on their device
    is moved there by the first, and stays for later ones as long as the shard lives.
    """

    spec: RoutingSpec  # of the whole model
    layers: tuple[RoutedLayer, ...]  # of this rank
    versions: tuple[int, ...]  # weight versions of the micro-batch, ascending
    missing: MissingRows | Literal["spread"]  # what was done with rows that have no route
    padding: PaddingRows
    trace: RoutingTrace  # N rows of this rank as one sequence without tokens, of its layers; of all if it has none
    row_R: NDArray[np.int32]  # as `TraceOnDevice.gather` takes them, every spread pick named
    faithful_N: NDArray[np.bool_] | None  # where tokens are taken out of the loss
    picks_PLK: NDArray[Any]  # for padding that is spread
    is_padded: bool  # whether any rank sees padding in this micro-batch
    tokens_C: NDArray[np.int32]  # in the order of the routers; -1 for padding
    dropped_C: NDArray[np.bool_] | None  # tokens that are taken out of the loss; None where there are none
    _there: dict[torch.device, TraceOnDevice] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"RouteShard({len(self.row_R)} rows, {len(self.layers)} layers, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Host memory that it holds for its rows, in bytes."""
        cut = self.trace
        arrays = (cut.expert_ids_NLK, cut.valid_N, self.row_R, self.tokens_C)
        sometimes = sum(each.nbytes for each in (self.faithful_N, self.dropped_C) if each is not None)
        return sum(each.nbytes for each in arrays) + sometimes

    @property
    def counted_C(self) -> NDArray[np.bool_]:
        """Bool [C], tokens that belong in the loss; False for padding."""
        real_C = np.asarray(self.tokens_C >= 0)
        return real_C if self.dropped_C is None else real_C & ~self.dropped_C

    @property
    def num_routed(self) -> int:
        """How many rows have a route here, padding that is spread among them."""
        return int(self.trace.valid_N.sum() + (self.row_R <= SPREAD).sum()) if self.layers else 0

    @property
    def is_whole(self) -> bool:
        """Whether every row, padding too, has a route here, so that nothing is left to the model's routers."""
        return self.num_routed == len(self.row_R)

    @cached_property
    def counts_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of the rows that have a route, padding that is spread among them."""
        num_experts, picks_PLK = self.spec.num_experts, self.picks_PLK
        times_P = np.bincount(SPREAD - self.row_R[self.row_R <= SPREAD], minlength=len(picks_PLK))
        counts_LE = np.zeros((len(self.layers), num_experts), np.int64)
        for layer, counts_E in enumerate(counts_LE):
            counts_E += np.bincount(self.trace.expert_ids_NLK[self.trace.valid_N, layer].ravel(), minlength=num_experts)
            np.add.at(counts_E, picks_PLK[:, layer], times_P[:, None])
        return counts_LE

    def on_device(self, device: torch.device) -> TraceOnDevice:
        """Give the cut trace on the device of a pass."""
        if device not in self._there:
            self._there[device] = TraceOnDevice(
                self.trace, device, picks_PLK=self.picks_PLK, faithful_N=self.faithful_N
            )
        return self._there[device]

    def rows(
        self,
        layers: Sequence[RoutedLayer],
        device: torch.device,
        *,
        mask_padding: bool = False,
        counts: Counts = "native",
    ) -> ReplayRows:
        """Gather the rows of layers that follow each other here, if any, on the device, which is not waited for."""
        # with `mask_padding`, statistics leave padding out even where no rank has any
        there, first = self.on_device(device), self.layers.index(layers[0]) if layers else 0
        # padding that is spread says so in `row_R`, and so do rows that are filled
        policy = Policy("drop" if self.missing == "drop" else "native", "native", counts, telemetry=False)
        part = slice(first, first + len(layers))
        rows = there.gather(there.upload("rows", self.row_R), policy, layers=part)
        masked = mask_padding or self.is_padded
        return replace(rows, padding_R=~rows.real_R if masked else None)


def shard(
    trace: RoutingTrace,
    layout: Layout,
    share: Share,
    layers: Sequence[RoutedLayer],
    home_LE: NDArray[np.integer],
    *,
    missing: MissingRows | Literal["spread"] = "error",
    padding: PaddingRows = "spread",
) -> RouteShard:
    """Cut a trace to what one rank replays: its layers, of which there may be none, and the rows of its share.

    The rank of each expert of these layers is `home_LE`, integers [L, E]. The rest is as in `RoutedMegatron.shard`.
    """
    trace.spec.require_alike("a layout of ranks")
    whole_rows, row_R = layout.rows(), share.of_routers(layout).rows().packed_row_R
    context_C = share.of_context(layout).rows().packed_row_R
    if missing == "error":
        refuse_missing(trace, whole_rows.packed_row_R)
    # The rows of a rank become one sequence: what lies before them, on other ranks, is known to `faithful_N` alone.
    seen_N = np.unique(row_R[row_R >= 0]) if layers else np.zeros(0, np.int64)
    cut = trace.without_streams()
    cut = (cut.select_layers(layers) if layers else cut).take_rows(seen_N, np.array([len(seen_N)]))
    # batches are compared with `tokens_C`, and versions with those of the whole: one number in the place of either
    nothing_N = np.broadcast_to(np.int32(0), len(seen_N))
    cut = replace(cut, token_ids_N=nothing_N, weight_versions_N=nothing_N)
    spec, picks_PLK = cut.spec, cut.expert_ids_NLK[:0]
    here_R = np.full(len(row_R), NATIVE, np.int32)
    if layers:
        here_R[row_R >= 0] = np.searchsorted(seen_N, row_R[row_R >= 0])
        is_spread_R = (row_R < 0) & (padding == "spread")
        if missing == "spread":
            is_spread_R[row_R >= 0] = ~trace.valid_N[row_R[row_R >= 0]]
        picks_PLK = spread_picks(spec, home_LE, share.number * spec.top_k)  # ranks begin with other experts
        here_R[is_spread_R] = SPREAD - np.arange(is_spread_R.sum()) % len(picks_PLK)
    faithful_N = dropped_C = None
    if missing == "drop":
        faithful_N, dropped_C = faithful_rows(trace), context_C >= 0
        dropped_C[dropped_C] = ~faithful_N[context_C[dropped_C]]
    return RouteShard(
        trace.spec,
        tuple(layers),
        trace.versions,
        missing,
        padding,
        cut,
        here_R,
        None if faithful_N is None else faithful_N[seen_N],
        picks_PLK,
        is_padded=bool(whole_rows.is_pad_R.any() or (missing == "spread" and not trace.valid_N.all())),
        tokens_C=np.append(trace.token_ids_N, np.int32(-1))[context_C],  # padding is row -1
        dropped_C=dropped_C if dropped_C is not None and dropped_C.any() else None,
    )
