"""What a forward call of a Megatron-Core model says about its micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.route_shard import RouteShard, Share
from foreroute.core.passes import LateChecks
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout import Layout, pack, pad
from foreroute.layout.slots import Side
from foreroute.replay import to_device
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import ascending


@dataclass(frozen=True)
class Call:
    """The arguments of one forward that say which token is where.

    Attributes:
        input_ids: integers [B, T] of this context-parallel rank, or None where a stage is given none.
        embedded: hidden states [T, B, H] that take the place of tokens, cut as routers see them, or None.
        packed: Megatron's PackedSeqParams of a packed batch, or None.
        padding_mask: bool [B, T], True for padding, or None.
        inference: Megatron's inference context, or None in training.
        stage_input: hidden states [T, B, H] that the stage before made, cut as routers see them; None on the first.
        device: where the chunk is.
        share: of the rows, on this rank.
    """

    input_ids: Tensor | None
    embedded: Tensor | None
    packed: Any
    padding_mask: Tensor | None
    inference: Any
    stage_input: Tensor | None
    device: torch.device
    share: Share

    @classmethod
    def read(cls, trunk: Any, share: Share, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Find them among the arguments of a call of the trunk, whose parameters have these names.

        Raises:
            BatchMismatchError: when tokens or padding are of a type that says something else.
        """
        given = dict(zip(names, args, strict=False)) | kwargs
        _require_types(given)
        inference, packed = given.get("inference_context"), given.get("packed_seq_params")
        return cls(
            _tensor(given.get("input_ids")),
            _tensor(given.get("decoder_input")),
            # of a padded batch they tell attention of its padding
            None if getattr(packed, "qkv_format", None) in ("sbhd", "bshd") else packed,
            _tensor(given.get("padding_mask")),
            given.get("inference_params") if inference is None else inference,
            None if getattr(trunk, "pre_process", True) else _tensor(trunk.decoder.input_tensor),
            next(trunk.parameters()).device,
            share,
        )

    @property
    def num_slots(self) -> int:
        """R, the rows that routers see in this call."""
        hidden = self.embedded if self.stage_input is None else self.stage_input
        if hidden is not None:
            return hidden.shape[0] * hidden.shape[1]
        if self.input_ids is None:
            raise ReplayError(
                "a forward of the model was given neither tokens, nor embeddings, nor what the stage before made"
            )
        return self.input_ids.numel() // self.share.sp

    @property
    def tokens_C(self) -> NDArray[np.int64] | None:
        """int64 [T · B], the tokens in the order of the routers: sequence first. Copied to the host."""
        return None if self.input_ids is None else _in_router_order(self.input_ids)

    def kept(self) -> MicroBatch:
        """Where the sequences are, and their tokens, to be looked at when the call is over.

        Raises:
            BatchMismatchError: when the batch does not say where they are.
            ReplayError: when steps of several requests are mixed in it.
        """
        past = 0
        if self.inference is not None:
            if not self.inference.is_static_batching():
                raise ReplayError(
                    "a dynamic inference context mixes steps of several requests in one forward, and which is whose is "
                    "not known here. Record static inference, or take the routes that the dynamic engine returns"
                )
            past = int(self.inference.sequence_len_offset)
        lengths_S, layout, width = _sequences(self)
        tokens_C = self.tokens_C
        # a copy: on the CPU they may be those that were given, which may be overwritten
        return MicroBatch(layout, lengths_S, past, width, None if tokens_C is None else tokens_C.copy())


@dataclass(frozen=True)
class MicroBatch:
    """What is kept of a call.

    Attributes:
        layout: where its sequences are, before ranks share them.
        lengths_S: int64 [S], of its sequences.
        past: positions that a key-value cache held before.
        width: positions of a sequence, padding included; None where they are packed.
        tokens_C: the tokens that this rank was given, or None.
    """

    layout: Layout
    lengths_S: NDArray[np.int64]
    past: int
    width: int | None
    tokens_C: NDArray[np.int64] | None


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _require_types(given: dict[str, Any]) -> None:
    tokens, padding = _tensor(given.get("input_ids")), _tensor(given.get("padding_mask"))
    if tokens is not None and (tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool):
        raise BatchMismatchError(
            f"input_ids are {tokens.dtype} of shape {tuple(tokens.shape)}; expected integers [batch, tokens]"
        )
    if padding is not None and padding.dtype != torch.bool:
        raise BatchMismatchError(
            f"padding_mask is {padding.dtype}; expected booleans [batch, tokens], True for padding"
        )


def parameter_names(forward: Callable[..., Any]) -> list[str]:
    """The parameters of a forward, in order."""
    return list(inspect.signature(forward).parameters)


def require_plain(call: Call) -> None:
    """Raise `BatchMismatchError` if routers would see the rows of a packed batch in an order of their own."""
    if getattr(call.packed, "local_cp_size", None) is not None:
        raise BatchMismatchError(
            "packed_seq_params.local_cp_size gives every micro-batch a context parallelism of its own; replay takes "
            "that of the model. Train without hybrid context parallelism"
        )
    if getattr(call.packed, "tokens_per_sample", None) is not None:
        raise BatchMismatchError(
            "packed_seq_params.tokens_per_sample has routers see the samples of a packed batch side by side, and "
            "attention one after the other; leave it unset, or pass the samples as a padded batch"
        )


def require_fits(call: Call, shard: RouteShard, checks: LateChecks) -> None:
    """Raise `BatchMismatchError` unless the call's tokens, where it has any, are those of the routes.

    On another device than the CPU they are compared there, and `checks` raise it later.
    """
    if call.input_ids is None:
        return
    if call.input_ids.numel() != len(shard.tokens_C):
        raise BatchMismatchError(
            f"the model is given {call.input_ids.numel()} slots on this rank and the layout has "
            f"{len(shard.tokens_C)}; lay the routes out as the batch is padded or packed"
        )
    if call.input_ids.device.type == "cpu":
        _require_tokens(call.input_ids, call.padding_mask, shard.tokens_C)
        return
    # whoever gave them may have overwritten them by then
    kept = call.input_ids.clone(), None if call.padding_mask is None else call.padding_mask.clone()
    checks.add(_differ_there(call, shard.tokens_C), partial(_require_tokens, *kept, shard.tokens_C))


def _differ_there(call: Call, wanted_C: NDArray[np.int32]) -> Tensor:
    """Bool [], whether `_require_tokens` would raise, on the device."""
    assert call.input_ids is not None, "compared where there are tokens"
    tokens_C, there_C = call.input_ids.T.reshape(-1), to_device(wanted_C, call.input_ids.device)
    is_pad_C = there_C < 0
    differs_C = ~is_pad_C & (there_C != tokens_C)
    if call.padding_mask is not None:
        return (differs_C | (is_pad_C != call.padding_mask.T.reshape(-1))).any()
    filler = tokens_C[int((wanted_C < 0).argmax())]
    return (differs_C | (is_pad_C & (tokens_C != filler))).any()


def _require_tokens(input_ids: Tensor, padding_mask: Tensor | None, wanted_C: NDArray[np.int32]) -> None:
    tokens = _in_router_order(input_ids)
    differs = (wanted_C >= 0) & (wanted_C != tokens)
    if differs.any():
        slot = int(differs.argmax())
        raise BatchMismatchError(
            f"slot {slot} of this rank (sequence first): token {int(tokens[slot])} in the batch, "
            f"{int(wanted_C[slot])} in the trace; {int(differs.sum())} of {len(tokens)} differ. Replay the "
            "trace of this micro-batch, with its sequences in order and padded on the same side"
        )
    _require_padding(padding_mask, wanted_C < 0, tokens)


def _require_padding(padding_mask: Tensor | None, is_pad_C: NDArray[np.bool_], tokens: NDArray[np.int64]) -> None:
    """What the trace takes for padding must be masked as such or, without a mask, hold one token throughout."""
    if padding_mask is not None:
        wrong_C = is_pad_C != np.asarray(padding_mask.detach().cpu().numpy(), np.bool_).T.reshape(-1)
        told = "by its padding_mask"
    else:
        filler = int(tokens[is_pad_C.argmax()]) if is_pad_C.any() else 0
        wrong_C = is_pad_C & (tokens != filler)
        told = f"as other padding holds token {filler} (if padding is no single token, pass padding_mask)"
    if wrong_C.any():
        slot = int(wrong_C.argmax())
        here, there = ("padding", "a token") if is_pad_C[slot] else ("a token", "padding")
        raise BatchMismatchError(
            f"slot {slot} of this rank (sequence first), token {int(tokens[slot])}, is {here} to the trace and {there} "
            f"to the batch, {told}; {int(wrong_C.sum())} slots are like that. Replay whole sequences, of which absent "
            "rows are a part"
        )


def _in_router_order(input_ids: Tensor) -> NDArray[np.int64]:
    """int64 [T · B], sequence first, copied to the host."""
    return np.asarray(input_ids.detach().cpu().numpy()).T.reshape(-1).astype(np.int64, copy=False)


def in_batch_order(shard: RouteShard, device: torch.device, batch: int) -> Tensor:
    """Bool [B, T] on the device, the tokens that belong in the loss; B is 1 where the stage is given no tokens."""
    return to_device(shard.counted_C, device).view(-1, batch).T


def find_layout(trace: RoutingTrace, call: Call) -> Layout:
    """Where the sequences of the trace are in the batch of a call, when nobody said so.

    A packed batch says it itself. Of a padded one the tokens tell on which side it is padded. The host waits for
    either, unless no sequence is padded.

    Raises:
        BatchMismatchError: when the batch has other sequences, or no tokens to tell by.
    """
    if call.packed is not None:
        return _packed_layout(trace, call)
    if call.input_ids is None:
        raise BatchMismatchError(
            "this pipeline stage is given no tokens, so that it cannot be seen where the rows of the trace are; "
            "shard them on every stage: routed.shard(trace, layout)"
        )
    share = call.share
    batch, width = call.input_ids.shape
    longest = int(trace.lengths.max(initial=0))
    if batch != len(trace) or longest > width * share.cp:
        raise BatchMismatchError(
            f"the batch has {batch} sequences of up to {width * share.cp} tokens and the trace has {len(trace)} of up "
            f"to {longest}; replay trace.select(...) of the micro-batch's sequences, cut as the batch is "
            "(trace.truncated)"
        )
    layouts = [pad(trace.lengths, side=side, order="sbhd", to=width * share.cp) for side in ("right", "left")]
    if (trace.lengths == width * share.cp).all():  # both are the same, and the host need not wait to see the tokens
        return layouts[0]
    tokens = call.tokens_C
    fits = [layout for layout in layouts if tokens is not None and _fits(trace, share.of_context(layout), tokens)]
    return fits[0] if fits else layouts[0]


def _fits(trace: RoutingTrace, part: Layout, tokens: NDArray[np.int64]) -> bool:
    rows = part.rows().row_of_slot_R
    return bool((trace.token_ids_N[rows] == tokens)[rows >= 0].all())


def _packed_layout(trace: RoutingTrace, call: Call) -> Layout:
    slots_S = packed_slots(call.packed)
    if len(slots_S) != len(trace):
        raise BatchMismatchError(
            f"the packed batch has {len(slots_S)} sequences and the trace has {len(trace)}; replay trace.select(...) "
            "of the micro-batch's sequences"
        )
    layout = pack(trace.lengths, slots=slots_S)
    width = 0 if call.input_ids is None else call.input_ids.numel() * call.share.cp
    return layout.align_total(width) if width > layout.num_slots else layout


def packed_slots(packed: Any) -> NDArray[np.int64]:
    """int64 [S], the slots of each sequence of a packed batch, padding included."""
    padded = packed.cu_seqlens_q_padded
    return lengths_of(packed.cu_seqlens_q if padded is None else padded)


def lengths_of(cumulative: Tensor) -> NDArray[np.int64]:
    """int64 [S], the lengths that cumulative ones are the sums of.

    Raises:
        BatchMismatchError: when they are not integers that ascend from 0.
    """
    offsets = cumulative.detach().cpu().numpy()
    if offsets.ndim != 1 or not offsets.size or not ascending(offsets, int(offsets[-1])):
        raise BatchMismatchError(
            f"packed_seq_params has cumulative lengths {offsets.dtype} {offsets.reshape(-1)[:8].tolist()} of shape "
            f"{offsets.shape}; expected integers [sequences + 1] that ascend from 0"
        )
    return np.asarray(np.diff(offsets.astype(np.int64)), np.int64)


def _sequences(call: Call) -> tuple[NDArray[np.int64], Layout, int | None]:
    """Lengths of the sequences of a batch, where they are, and the width of one."""
    share = call.share
    if call.packed is not None:
        lengths = lengths_of(call.packed.cu_seqlens_q)
        layout = pack(lengths, slots=packed_slots(call.packed))
        width = 0 if call.input_ids is None else call.input_ids.numel() * share.cp
        return lengths, layout.align_total(width) if width > layout.num_slots else layout, None
    if call.input_ids is None:
        raise BatchMismatchError("this pipeline stage is given no tokens; pass input_ids on every stage to record")
    batch, width = call.input_ids.shape
    lengths = np.full(batch, width * share.cp)
    if call.padding_mask is None:
        return lengths, pad(lengths, side="right", order="sbhd"), width * share.cp
    lengths, layout = _masked(call.padding_mask.cpu().numpy().astype(np.bool_), share)
    return lengths, layout, width * share.cp


def _masked(padding_BT: NDArray[np.bool_], share: Share) -> tuple[NDArray[np.int64], Layout]:
    lengths = (~padding_BT).sum(axis=1)
    sides: dict[Side, NDArray[np.bool_]] = {"right": padding_BT[:, ::-1], "left": padding_BT}
    position = np.arange(padding_BT.shape[1])
    for side, from_it in sides.items():
        # padding on one side: after so many slots of it, seen from there, no more
        if share.cp == 1 and (from_it == (position < padding_BT.sum(axis=1)[:, None])).all():
            layout = pad(lengths, side=side, order="sbhd", to=padding_BT.shape[1])
            return lengths, layout
    raise BatchMismatchError(
        "padding_mask marks slots on both sides or in between, or context parallelism cuts it; record such a batch "
        "without the mask and cut the trace with trace.truncated(lengths)"
    )
