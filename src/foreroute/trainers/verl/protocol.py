"""verl's data protocol: routes as a field of a batch, beside `input_ids` and laid out like them.

Both of its rollout engines, vLLM and SGLang, end in the same field. Row p is the routing of input position p; what an
engine did not route is a row of zeros: padding, the last sampled token, what follows the last turn of a tool, and whole
sequences that fill a batch up. The layer axis counts all decoder layers, dense ones as zeros, or the routed ones alone.

    padded     input_ids [B, T], attention_mask [B, T], routed_experts int16 [B, T, layers, K]
    unpadded   input_ids [B, j1] and routed_experts int16 [B, j1, layers, K], jagged nested tensors of the same lengths

Since the field rides in the batch, what verl does to a batch (reordering, chunks for ranks, mini and micro batches,
removal of padding) is done to the routes as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.capture import decode
from foreroute.capture.verl_batch import kept_by_mask, routed_rows
from foreroute.checks import whole_number
from foreroute.errors import BatchMismatchError, CaptureError
from foreroute.trace import INDEXER, NO_VERSION, RoutingSpec, RoutingTrace
from foreroute.trace.spec import MAX_LAYERS
from foreroute.trainers.verl.packed_batch import FIELD, field_of, fields_of


def trace_of(batch: Any, *, model: RoutingSpec, weight_version: int = NO_VERSION) -> RoutingTrace:
    """Read the routes of a batch of verl, checked.

    Args:
        batch: a `DataProto`, a `TensorDict` or a mapping with `routed_experts` and `input_ids`, both unpadded, or both
            padded and an `attention_mask`.
        model: experts, picks and routed layers; the layer axis may count dense layers too.
        weight_version: the weights that computed the routes. By default those of `versions_of`, of sequences that one
            version sampled.

    Returns:
        S sequences, in the order of the batch. Rows of zeros at the end of a sequence are absent; so is all of a
        sequence that fills the batch up.

    Raises:
        CaptureError: when fields are missing or laid out differently; when the routes cannot be true; when a row of
            zeros stands before a routed one; when there is no route at all, and `response_mask` does not say that
            nothing is trained on; when the model is top-1, where a row of zeros may be expert 0 or "never routed".
    """
    fields = fields_of(batch)
    tokens, rows = _sequences(fields)
    valid = [routed_rows(r, s) for s, r in enumerate(rows)]
    if not any(v.any() for v in valid):
        if any(len(r) > 1 for r in rows) and _trains(fields):
            raise CaptureError(
                f"{FIELD} holds nothing but zeros: the rollout engine returned no routes. Start it with "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True; a batch that only fills up has a "
                "response_mask of zeros"
            )
        return RoutingTrace.unrouted(model, tokens).with_provenance(wire="verl")
    # The last token has a route where verl cut a response, and under R2, which has those of a pass of the trainer.
    # decode takes none for a last one, so it is given a token more.
    behind = [np.append(each, each[-1:]) for each in tokens]
    trace = decode(rows, model=model, token_ids=behind, valid=valid, weight_version=weight_version)
    trace = trace.truncated([len(each) for each in tokens])
    oldest_S, newest_S = versions_of(batch)
    if weight_version == NO_VERSION and (oldest_S >= 0).any():
        version_S = np.where(oldest_S == newest_S, oldest_S, NO_VERSION).astype(np.int32)
        versions_N = np.where(trace.valid_N, version_S.repeat(trace.lengths), np.int32(NO_VERSION))
        trace = replace(trace, weight_versions_N=versions_N)
    return trace.with_provenance(wire="verl")


def versions_of(batch: Any) -> NDArray[np.int64]:
    """Read the oldest and the newest weights that sampled each sequence, int64 [2, S], as verl counts its steps."""
    given = getattr(batch, "non_tensor_batch", batch)
    stated = [given.get(name, None) for name in ("min_global_steps", "max_global_steps")]
    num_sequences = len(field_of(fields_of(batch), "input_ids"))
    versions = [[None] * num_sequences if each is None else each.tolist() for each in stated]
    return np.array([[NO_VERSION if v is None else v for v in each] for each in versions], np.int64)


def routed_experts(trace: RoutingTrace, batch: Any, *, num_hidden_layers: int | None = None) -> Tensor:
    """Write the routes of a trace as the field of a batch, to be stored in it under `FIELD`.

    Args:
        trace: routes of the sequences of the batch, in its order.
        batch: as in `trace_of`; its field of routes, if it has one, is not looked at.
        num_hidden_layers: decoder layers in all; when given, dense layers get columns of zeros, as engines write them.

    Returns:
        int16 [B, T, layers, K] beside padded `input_ids`, else a jagged nested tensor [B, j1, layers, K]; on the device
        of the tokens. Absent rows and padding are zeros.

    Raises:
        BatchMismatchError: when the batch holds other tokens than the trace.
        CaptureError: when the trace has choices of indexers, for which verl has no field; when an id does not fit 16
            bits; or a row would be read back as something else: an absent one before a routed one, and expert 0 of a
            top-1 model in all layers.
    """
    if INDEXER in trace.streams:
        raise CaptureError(
            "the trace has choices of indexers, and verl has no field for them; take them off with "
            f'trace.without_streams("{INDEXER}"), to carry the routes alone'
        )
    ids, mask = _tokens_and_mask(fields_of(batch))
    _require_readable(trace)
    rows = _rows_of(trace, num_hidden_layers)
    tokens = _unpadded(ids, mask)
    if len(tokens) != len(trace) or any(not np.array_equal(t, trace.tokens(s)) for s, t in enumerate(tokens)):
        raise BatchMismatchError(
            f"the batch has {len(tokens)} sequences and the trace {len(trace)}, of other tokens or in another order; "
            "select the sequences of the batch first: trace.select(...)"
        )
    if mask is None:
        parts = [torch.from_numpy(part) for part in rows]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged, device=ids.device)
    padded = torch.zeros((*ids.shape, *rows[0].shape[1:]), dtype=torch.int16, device=ids.device)
    padded[mask.bool()] = torch.from_numpy(np.concatenate(rows)).to(ids.device)
    return padded


def _tokens_and_mask(fields: Any) -> tuple[Any, Tensor | None]:
    """Find `input_ids`, and their mask [B, T] where they are padded."""
    ids = field_of(fields, "input_ids")
    if ids.is_nested:
        return ids, None
    mask = field_of(fields, "attention_mask")
    if mask.is_nested or ids.ndim != 2 or mask.shape != ids.shape:
        raise CaptureError(
            f"attention_mask is {tuple(mask.shape)} and input_ids {tuple(ids.shape)}; expected [B, T] both"
        )
    return ids, mask


def _sequences(fields: Any) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Read tokens [T] and rows [T, layers, K] of each sequence."""
    routes = field_of(fields, FIELD)
    ids, mask = _tokens_and_mask(fields)
    if routes.is_nested != ids.is_nested:
        forms = {True: "unpadded (nested)", False: "padded"}
        raise CaptureError(
            f"input_ids are {forms[ids.is_nested]} and {FIELD} are {forms[routes.is_nested]}; expected both alike, as "
            "verl's left_right_2_no_padding leaves them"
        )
    if routes.ndim != 4 or (mask is not None and routes.shape[:2] != ids.shape):
        raise CaptureError(
            f"{FIELD} has shape {tuple(routes.shape)} beside input_ids {tuple(ids.shape)}; expected [B, T, layers, K]"
        )
    tokens, rows = _unpadded(ids, mask), _unpadded(routes, mask)
    uneven = [(s, len(t), len(r)) for s, (t, r) in enumerate(zip(tokens, rows, strict=True)) if len(t) != len(r)]
    if uneven:
        s, expected, seen = uneven[0]
        raise CaptureError(f"sequence {s} has {seen} rows of {FIELD} for {expected} tokens; expected one for each")
    return tokens, rows


def _unpadded(values: Any, mask: Tensor | None) -> list[NDArray[Any]]:
    """Copy each sequence to the host."""
    if mask is None:
        return np.split(values.values().cpu().numpy(), values.offsets().cpu().numpy()[1:-1])
    host, kept = values.cpu().numpy(), kept_by_mask(mask.cpu().numpy())
    return [part[row] for part, row in zip(host, kept, strict=True)]


def _trains(fields: Any) -> bool:
    """Say whether a token of the batch is trained on, as far as the batch says."""
    if fields.get("response_mask", None) is None:
        return True
    mask = field_of(fields, "response_mask")
    return bool((mask.values() if mask.is_nested else mask).any())


def _require_readable(trace: RoutingTrace) -> None:
    """Raise `CaptureError` where zeros in the place of absent rows would be taken for something else."""
    valid_N, sequence_N = trace.valid_N, np.repeat(np.arange(len(trace)), trace.lengths)
    gap_N = ~valid_N[:-1] & valid_N[1:] & (sequence_N[:-1] == sequence_N[1:])
    zero_N = valid_N & ~trace.expert_ids_NLK.any(axis=(1, 2))
    for wrong_N, before, behind in (
        (gap_N, "has no route at", "and one behind it; verl's field says so only at the end of a sequence"),
        (
            zero_N,
            "goes to expert 0 in all layers at",
            "which in verl's field means 'never routed'; routes of top-1 models cannot be kept in it",
        ),
    ):
        if wrong_N.any():
            row = int(wrong_N.argmax())
            s = int(sequence_N[row])
            raise CaptureError(f"sequence {s} {before} position {row - int(trace.offsets[s])}, {behind}")


def _rows_of(trace: RoutingTrace, num_hidden_layers: int | None) -> list[NDArray[np.int16]]:
    """Give S arrays int16 [T, layers, K], zeros where nothing was routed."""
    spec = trace.spec
    spec.require_alike("verl's field")
    if spec.num_experts > np.iinfo(np.int16).max:
        raise CaptureError(f"verl keeps expert ids in signed 16 bits, and the model has {spec.num_experts} experts")
    width, columns = spec.num_layers, list(range(spec.num_layers))
    if num_hidden_layers is not None:
        width = whole_number(num_hidden_layers, name="num_hidden_layers", most=MAX_LAYERS, error=CaptureError)
        columns = [layer.index for layer in spec.layers]
        if len(set(columns)) < len(columns) or max(columns) >= width:
            raise CaptureError(
                f"num_hidden_layers is {width}, and the trace routes in layers {columns[:8]}; expected the count of "
                "all decoder layers, with one router in each"
            )
    wide = np.zeros((trace.num_rows, width, spec.top_k), np.int16)
    wide[:, columns] = np.where(trace.valid_N[:, None, None], trace.expert_ids_NLK, 0)
    return np.split(wide, trace.offsets[1:-1])
