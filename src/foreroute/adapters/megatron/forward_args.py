"""What a forward call of a Megatron-Core model says about its micro-batch, and whether it is that of the routes.

Letters: B sequences of a batch of T positions, C = B · T rows that the model is handed on this rank, sequence first,
R of them that routers see, S sequences of a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.route_shard import RouteShard, Share
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout.router_rows import Layout, Side, pack, pad
from foreroute.replay.rows import to_device, to_host
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import ascending

SIDES: tuple[Side, ...] = ("right", "left")
OTHER_ORDER = {
    "local_cp_size": "gives every micro-batch a context parallelism of its own; replay takes that of the model. Train "
    "without hybrid context parallelism",
    "tokens_per_sample": "has routers see the samples of a packed batch side by side, and attention one after the "
    "other; leave it unset, or pass the samples as a padded batch",
}
"""Settings of a packed batch by which routers see its rows in an order of their own."""
OFFSETS = ("cu_seqlens_q", "cu_seqlens_q_padded")


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
    share: Share  # of the rows, on this rank

    @classmethod
    def read(cls, trunk: Any, share: Share, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Find the arguments among those of a call of the trunk, whose parameters have these names."""
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens, padding = _tensor(given.get("input_ids")), _tensor(given.get("padding_mask"))
        if tokens is not None and tokens.is_nested:  # verl's, which stages behind the first are handed unpacked
            tokens = None
        packed, inference = given.get("packed_seq_params"), given.get("inference_context")
        inference = given.get("inference_params") if inference is None else inference
        if tokens is not None and (tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool):
            raise BatchMismatchError(
                f"input_ids are {tokens.dtype} of shape {tuple(tokens.shape)}; expected integers [batch, tokens]"
            )
        if padding is not None and padding.dtype != torch.bool:
            raise BatchMismatchError(
                f"padding_mask is {padding.dtype}; expected booleans [batch, tokens], True for padding"
            )
        if getattr(packed, "qkv_format", None) in ("sbhd", "bshd"):  # of a padded batch: attention is told of padding
            packed = None
        for name, why in OTHER_ORDER.items():
            if getattr(packed, name, None) is not None:
                raise BatchMismatchError(f"packed_seq_params.{name} {why}")
        # hidden states [T, B, H] are cut as routers see them: of the stage before, or in the place of tokens
        is_first = getattr(trunk, "pre_process", True)
        hidden = _tensor(given.get("decoder_input") if is_first else trunk.decoder.input_tensor)
        if hidden is None and tokens is None:
            raise ReplayError(
                "a forward of the model was given neither tokens, nor embeddings, nor what the stage before made"
            )
        return cls(
            tokens,
            packed,
            padding,
            inference,
            int(getattr(inference, "sequence_len_offset", None) or 0),
            _numel(tokens) // share.sp if hidden is None else hidden.shape[0] * hidden.shape[1],
            next(trunk.parameters()).device,
            share,
        )

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
            return lengths_S, _packed(self, lengths_S), None
        assert self.input_ids is not None, "kept as it was"
        batch, width = len(self.input_ids), self.input_ids.shape[1] * self.share.cp
        is_pad_C = np.zeros(width * batch, np.bool_) if self.padding_mask is None else on_host(self.padding_mask)
        lengths_S = width - is_pad_C.reshape(-1, batch).sum(0)
        for side in SIDES:
            layout = pad(lengths_S, side=side, order="sbhd", to=width)
            if np.array_equal(layout.rows().is_pad_R, is_pad_C):
                return lengths_S, layout, width
        raise BatchMismatchError(
            "padding_mask marks slots on both sides or in between, or context parallelism cuts it; record such a batch "
            "without the mask and cut the trace with trace.truncated(lengths)"
        )


def find_layout(trace: RoutingTrace, call: Call, checks: DeferredChecks) -> Layout:
    """Lay out the sequences of the trace as a batch has them; a padded one is taken to be so on the right."""
    if call.packed is not None:
        offsets = _padded_offsets(call)
        # without padding the trace says where sequences are, and the host need not wait for what the batch says
        is_full = _numel(call.input_ids) * call.share.cp == trace.num_rows and len(offsets) == len(trace) + 1
        if not is_full:
            return _packed(call, trace.lengths)
        wrong = (offsets != to_device(trace.offsets, offsets.device)).any()
        checks.add(wrong, partial(_packed, call.kept(), trace.lengths))
        return pack(trace.lengths)
    if call.input_ids is None:
        raise BatchMismatchError(
            "this pipeline stage is given no tokens, so that it cannot be seen where the rows of the trace are; "
            "shard them on every stage: routed.shard(trace, layout)"
        )
    batch, width = len(call.input_ids), call.input_ids.shape[1] * call.share.cp
    longest = int(trace.lengths.max(initial=0))
    if batch != len(trace) or longest > width:
        raise BatchMismatchError(
            f"the batch has {batch} sequences of up to {width} tokens and the trace has {len(trace)} of up to "
            f"{longest}; replay trace.select(...) of the micro-batch's sequences, cut as the batch is (trace.truncated)"
        )
    return pad(trace.lengths, side="right", order="sbhd", to=width)


def compare_tokens(call: Call, shard: RouteShard) -> tuple[Tensor, Tensor]:
    """Find bool [C] on the device: what holds another token than routes, what only one of the two takes for padding."""
    assert call.input_ids is not None, "compared where there are tokens"
    given_C = call.input_ids.T.reshape(-1)
    wanted_C = shard.on_device(given_C.device).upload("tokens", shard.tokens_C)
    is_pad_C = wanted_C < 0
    other_C = ~is_pad_C & (wanted_C != given_C)
    if call.padding_mask is not None:
        return other_C, is_pad_C != call.padding_mask.T.reshape(-1)
    return other_C, is_pad_C & (given_C != given_C[_first_padding(shard)])


def require_fits(call: Call, shard: RouteShard) -> None:
    """Raise `BatchMismatchError` where the tokens of a call are not those of routes."""
    # what routes take for padding must be masked as such or, without a mask, hold one token throughout
    assert call.input_ids is not None, "compared where there are tokens"
    other_C, padding_C = (on_host(each) for each in compare_tokens(call, shard))
    tokens_C = on_host(call.input_ids)
    if other_C.any():
        slot = int(other_C.argmax())
        raise BatchMismatchError(
            f"slot {slot} of this rank (sequence first): token {int(tokens_C[slot])} in the batch, "
            f"{int(shard.tokens_C[slot])} in the trace; {int(other_C.sum())} of {len(tokens_C)} differ. Replay the "
            "trace of this micro-batch, with its sequences in order; where it is padded on the left, give "
            'layout=pad(trace.lengths, side="left", order="sbhd", to=...)'
        )
    if not padding_C.any():
        return
    slot = int(padding_C.argmax())
    seen_by = "by its padding_mask"
    if call.padding_mask is None:
        filler = int(tokens_C[_first_padding(shard)])
        seen_by = f"as other padding holds token {filler} (if padding is no single token, pass padding_mask)"
    here, there = ("padding", "a token") if shard.tokens_C[slot] < 0 else ("a token", "padding")
    raise BatchMismatchError(
        f"slot {slot} of this rank (sequence first), token {int(tokens_C[slot])}, is {here} to the trace and {there} "
        f"to the batch, {seen_by}; {int(padding_C.sum())} slots are like that. Replay whole sequences, of which absent "
        "rows are a part"
    )


def lengths_of(cumulative: Tensor) -> NDArray[np.int64]:
    """Read the lengths that cumulative ones are the sums of, int64 [S]. The host waits for them."""
    offsets = to_host(cumulative)
    if offsets.ndim != 1 or not offsets.size or not ascending(offsets, int(offsets[-1])):
        raise BatchMismatchError(
            f"packed_seq_params has cumulative lengths {offsets.dtype} {offsets.reshape(-1)[:8].tolist()} of shape "
            f"{offsets.shape}; expected integers [sequences + 1] that ascend from 0"
        )
    return np.asarray(np.diff(offsets.astype(np.int64)), np.int64)


def _packed(call: Call, lengths_S: NDArray[np.int64]) -> Layout:
    """Lay out sequences of these lengths as a packed batch has them."""
    padded_S = lengths_of(_padded_offsets(call))
    if len(padded_S) != len(lengths_S):
        raise BatchMismatchError(
            f"the packed batch has {len(padded_S)} sequences and the trace has {len(lengths_S)}; replay "
            "trace.select(...) of the micro-batch's sequences"
        )
    layout, width = pack(lengths_S, padded_lengths=padded_S), _numel(call.input_ids) * call.share.cp
    return layout.align_total(width) if width > layout.num_router_rows else layout


def _padded_offsets(call: Call) -> Tensor:
    padded, plain = call.packed.cu_seqlens_q_padded, call.packed.cu_seqlens_q
    offsets: Tensor = plain if padded is None else padded
    return offsets


def _first_padding(shard: RouteShard) -> int:
    return int((shard.tokens_C < 0).argmax())


def _numel(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def on_host(of_slots: Tensor) -> NDArray[Any]:
    """Copy [B, T] to the host as [C], in the order of routers: sequence first. The host waits for it."""
    return to_host(of_slots).T.reshape(-1)
