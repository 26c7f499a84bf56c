"""What a forward call of a Megatron-Core model says about its micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.placing import PlacedRoutes
from foreroute.adapters.megatron.ranks import Share
from foreroute.errors import BatchMismatchError
from foreroute.layout import Layout, pack, pad
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
    """

    input_ids: Tensor | None
    embedded: Tensor | None
    packed: Any
    padding_mask: Tensor | None
    inference: Any

    @classmethod
    def read(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Find them among the arguments of a call whose parameters have these names.

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
        )

    @property
    def tokens_C(self) -> NDArray[np.int64] | None:
        """int64 [T · B], the tokens in the order of the routers: sequence first. Copied to the host."""
        if self.input_ids is None:
            return None
        return np.asarray(self.input_ids.detach().cpu().numpy()).T.reshape(-1).astype(np.int64, copy=False)


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


def require_fits(call: Call, placed: PlacedRoutes) -> None:
    """Raise `BatchMismatchError` unless the call's tokens, where it has any, are those of the routes."""
    tokens = call.tokens_C
    if tokens is None:
        return
    if len(tokens) != len(placed.tokens_C):
        raise BatchMismatchError(
            f"the model is given {len(tokens)} slots on this rank and the layout has {len(placed.tokens_C)}; lay the "
            "routes out as the batch is padded or packed"
        )
    differs = _differs(placed.tokens_C, tokens)
    if differs.any():
        slot = int(differs.argmax())
        raise BatchMismatchError(
            f"slot {slot} of this rank (sequence first): token {int(tokens[slot])} in the batch, "
            f"{int(placed.tokens_C[slot])} in the trace; {int(differs.sum())} of {len(tokens)} differ. Replay the "
            "trace of this micro-batch, with its sequences in order and padded on the same side"
        )
    _require_padding(call, placed.tokens_C < 0, tokens)


def _require_padding(call: Call, is_pad_C: NDArray[np.bool_], tokens: NDArray[np.int64]) -> None:
    """What the trace takes for padding must be masked as such or, without a mask, hold one token throughout."""
    if call.padding_mask is not None:
        wrong_C = is_pad_C != np.asarray(call.padding_mask.detach().cpu().numpy(), np.bool_).T.reshape(-1)
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


def _differs(wanted_C: NDArray[np.int32], tokens_C: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray((wanted_C >= 0) & (wanted_C != tokens_C))


def find_layout(trace: RoutingTrace, call: Call, share: Share) -> Layout:
    """Where the sequences of the trace are in the batch of a call, when nobody said so.

    A packed batch says it itself. Of a padded one the tokens tell on which side it is padded.

    Raises:
        BatchMismatchError: when the batch has other sequences, or no tokens to tell by.
    """
    if call.packed is not None:
        return _packed_layout(trace, call, share)
    if call.input_ids is None:
        raise BatchMismatchError(
            "this pipeline stage is given no tokens, so that it cannot be seen where the rows of the trace are; "
            "place them on every stage: routed.place(trace, layout)"
        )
    batch, width = call.input_ids.shape
    longest = int(trace.lengths.max(initial=0))
    if batch != len(trace) or longest > width * share.cp:
        raise BatchMismatchError(
            f"the batch has {batch} sequences of up to {width * share.cp} tokens and the trace has {len(trace)} of up "
            f"to {longest}; replay trace.select(...) of the micro-batch's sequences, cut as the batch is "
            "(trace.truncated)"
        )
    tokens = call.tokens_C
    layouts = [pad(trace.lengths, side=side, order="sbhd", to=width * share.cp) for side in ("right", "left")]
    fits = [layout for layout in layouts if tokens is not None and _fits(trace, share.of_context(layout), tokens)]
    return fits[0] if fits else layouts[0]


def _fits(trace: RoutingTrace, part: Layout, tokens: NDArray[np.int64]) -> bool:
    rows = part.rows().row_of_slot_R
    return bool((trace.token_ids_N[rows] == tokens)[rows >= 0].all())


def _packed_layout(trace: RoutingTrace, call: Call, share: Share) -> Layout:
    slots_S = packed_slots(call.packed)
    if len(slots_S) != len(trace):
        raise BatchMismatchError(
            f"the packed batch has {len(slots_S)} sequences and the trace has {len(trace)}; replay trace.select(...) "
            "of the micro-batch's sequences"
        )
    layout = pack(trace.lengths, slots=slots_S)
    width = 0 if call.input_ids is None else call.input_ids.numel() * share.cp
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
