"""Micro-batch of a forward call of a Megatron-Core model, and the ranks' shares of its rows.

Letters: B sequences of a batch of T positions, C = B · T rows that the model is handed on this rank, sequence first,
R of them that routers see, S sequences of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import BatchMismatchError, LayoutError, ReplayError
from foreroute.layout.router_rows import Layout, Side, pack, pad
from foreroute.replay.rows import to_device, to_host
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import ascending

if TYPE_CHECKING:
    from foreroute.adapters.megatron.hooks import ChunkHooks

SIDES: tuple[Side, ...] = ("right", "left")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_q_padded")


@dataclass(frozen=True)
class Share:
    """Shares of a micro-batch's rows among context-parallel ranks, and those that cut what these are left."""

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


@dataclass(frozen=True)
class Call:
    """The arguments of one forward that say which token is where."""

    input_ids: Tensor | None  # integers [B, T] of this context-parallel rank; None where a stage is given none
    packed: Any  # Megatron's PackedSeqParams of a packed batch, or None
    padding_mask: Tensor | None  # bool [B, T], True for padding
    inference: Any  # Megatron's inference context; None in training
    past: int  # positions that its key-value cache held before
    num_router_rows: int  # R, the rows that routers see
    device: torch.device
    hooks: ChunkHooks  # on the chunk that is called

    @property
    def num_tokens(self) -> int:
        """C, rows that the model is handed; 0 where it is given no tokens."""
        return 0 if self.input_ids is None else self.input_ids.numel()

    @property
    def offsets(self) -> Tensor:
        """Offsets of the sequences in a packed batch, padding between them included."""
        padded, plain = self.packed.cu_seqlens_q_padded, self.packed.cu_seqlens_q
        offsets: Tensor = plain if padded is None else padded
        return offsets

    def kept(self) -> Call:
        """Copy what was given, to be read later, when whoever gave it may have overwritten it."""
        if self.inference is not None and not self.inference.is_static_batching():
            raise ReplayError(
                "a dynamic inference context mixes steps of several requests in one forward, and which is whose is "
                "not known here. Record static inference, or take the routes that the dynamic engine returns"
            )
        packed = self.packed
        if packed is None and self.input_ids is None:
            raise BatchMismatchError("this pipeline stage is given no tokens; pass input_ids on every stage to record")
        if packed is not None:
            packed = SimpleNamespace(**{name: _clone(getattr(packed, name)) for name in OFFSETS})
        mask = _clone(self.padding_mask)
        return replace(self, input_ids=_clone(self.input_ids), packed=packed, padding_mask=mask)

    def sequences(self) -> tuple[NDArray[np.int64], Layout, int | None]:
        """Read lengths int64 [S] of what was recorded, where it is, and positions of a sequence, None where packed."""
        if self.packed is not None:
            lengths_S = lengths_of(self.packed.cu_seqlens_q)
            return lengths_S, _pack(self.offsets, self.num_tokens * self.hooks.share.cp, lengths_S), None
        assert self.input_ids is not None, "kept as it was"
        batch, width = len(self.input_ids), self.input_ids.shape[1] * self.hooks.share.cp
        mask = self.padding_mask
        is_pad_C = np.zeros(width * batch, np.bool_) if mask is None else to_host(mask).T.reshape(-1)
        lengths_S = width - is_pad_C.reshape(-1, batch).sum(0)
        for side in SIDES:
            layout = pad(lengths_S, side=side, order="sbhd", to=width)
            if np.array_equal(layout.rows().is_pad_R, is_pad_C):
                return lengths_S, layout, width
        raise BatchMismatchError(
            "padding_mask marks rows on both sides or in between, or context parallelism cuts it; record such a batch "
            "without the mask and cut the trace with trace.truncated(lengths)"
        )


def find_layout(trace: RoutingTrace, call: Call, checks: DeferredChecks) -> Layout:
    """Lay out the sequences of the trace as a batch has them; a padded one is taken to be so on the right."""
    if call.packed is not None:
        offsets, width = call.offsets, call.num_tokens * call.hooks.share.cp
        # without padding the trace says where sequences are, and the host need not wait for what the batch says
        if width != trace.num_rows or len(offsets) != len(trace) + 1:
            return _pack(offsets, width, trace.lengths)
        wrong = (offsets != to_device(trace.offsets, offsets.device)).any()
        checks.add(wrong, partial(_pack, offsets.clone(), width, trace.lengths))
        return pack(trace.lengths)
    if call.input_ids is None:
        raise BatchMismatchError(
            "this pipeline stage is given no tokens, so that it cannot be seen where the rows of the trace are; "
            "shard them on every stage: routed.shard(trace, layout)"
        )
    batch, width = len(call.input_ids), call.input_ids.shape[1] * call.hooks.share.cp
    longest = int(trace.lengths.max(initial=0))
    if batch != len(trace) or longest > width:
        raise BatchMismatchError(
            f"the batch has {batch} sequences of up to {width} tokens and the trace has {len(trace)} of up to "
            f"{longest}; replay trace.select(...) of the micro-batch's sequences, cut as the batch is (trace.truncated)"
        )
    return pad(trace.lengths, side="right", order="sbhd", to=width)


def lengths_of(cumulative: Tensor) -> NDArray[np.int64]:
    """Read the lengths that cumulative ones are the sums of, int64 [S]. The host waits for them."""
    offsets = to_host(cumulative)
    if offsets.ndim != 1 or not offsets.size or not ascending(offsets, int(offsets[-1])):
        raise BatchMismatchError(
            f"packed_seq_params has cumulative lengths {offsets.dtype} {offsets.reshape(-1)[:8].tolist()} of shape "
            f"{offsets.shape}; expected integers [sequences + 1] that ascend from 0"
        )
    return np.asarray(np.diff(offsets.astype(np.int64)), np.int64)


def _pack(offsets: Tensor, width: int, lengths_S: NDArray[np.int64]) -> Layout:
    """Lay out sequences of these lengths as a packed batch of this many rows has them. The host waits for it."""
    padded_S = lengths_of(offsets)
    if len(padded_S) != len(lengths_S):
        raise BatchMismatchError(
            f"the packed batch has {len(padded_S)} sequences and the trace has {len(lengths_S)}; replay "
            "trace.select(...) of the micro-batch's sequences"
        )
    layout = pack(lengths_S, padded_lengths=padded_S)
    return layout.align_total(width) if width > layout.num_router_rows else layout


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
