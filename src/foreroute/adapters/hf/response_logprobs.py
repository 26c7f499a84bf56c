"""Log-probs of sampled tokens, for which no logits of other positions are computed.

Letters: B sequences of a batch of T positions, R response tokens, V vocabulary, H hidden size, N packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foreroute.capture import Generation
from foreroute.core.hooks import overridden
from foreroute.replay.rows import to_device
from foreroute.replay.sampling_masks import masked_entropy_of_logits, masked_logprobs_of_logits
from foreroute.trace import SAMPLING, RoutingTrace


def response_log_probs(
    model: Any, generation: Generation, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probability of each sampled token, and on request the entropy of what it was sampled from.

    One forward of a Hugging Face model. Both are on the recorded sets where top-p, top-k or min-p left tokens out.

    Returns:
        Tensors [R] in float32, or in the logits' dtype where that is wider: response tokens packed sequence after
        sequence. Log-probs have the same bits with the entropy and without. Entropy is in nats, without gradient.
    """
    ((rows, logits_RV),) = response_logits(model, generation)
    targets_R = sampled_tokens(generation, rows, logits_RV.device)
    if (masks := generation.trace.streams.get(SAMPLING)) is not None:
        masks_R = masks.take(np.flatnonzero(generation.sampled_N) - 1)
        logprobs_R = masked_logprobs_of_logits(logits_RV, targets_R, masks_R, temperature=temperature)
        if not entropy:
            return logprobs_R, None
        return logprobs_R, masked_entropy_of_logits(logits_RV.detach(), targets_R, masks_R, temperature=temperature)
    scaled_RV = logits_RV if temperature == 1 else logits_RV / temperature
    if not entropy:  # one pass over the logits less
        return -cross_entropy(scaled_RV, targets_R, reduction="none"), None
    logprobs_RV = scaled_RV.log_softmax(-1)
    entropy_R = -(logprobs_RV.detach().exp() * logprobs_RV.detach()).sum(-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], entropy_R


def response_logits(
    model: Any, generation: Generation, *, whole: bool = False, rows_at_once: int | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield rows of the R response tokens, and the logits [rows, V] they were sampled from, in float32 or wider.

    The forward runs at the call, its head on the first `rows_at_once` rows. The head runs on further ones as they are
    asked for, when a session that was open at the call may be closed. With `whole` the last token of each sequence is
    put in too, so that it is routed. With gradients, all rows come at once.
    """
    trace = generation.trace if whole else inputs(generation.trace)
    input_ids_BT, mask_BT = pad(trace)
    tokens_N = np.flatnonzero(generation.sampled_N)
    sequences_R = np.searchsorted(generation.trace.offsets, tokens_N, side="right") - 1
    # the logits at position p are those of token p + 1
    positions_R = tokens_N - 1 - generation.trace.offsets[sequences_R]
    picked_R = to_device(sequences_R * mask_BT.shape[1] + positions_R, model.device)
    step = max(len(tokens_N), 1) if rows_at_once is None else rows_at_once
    given: list[Any] = []

    def pick(_: nn.Module, __: Any, outputs: Any) -> Any:
        states_1RH = outputs.last_hidden_state.flatten(0, 1).index_select(0, picked_R)[None]
        given.append(replace(outputs, last_hidden_state=states_1RH))
        return replace(outputs, last_hidden_state=states_1RH[:, :step])

    handle = model.base_model.register_forward_hook(pick)
    try:
        ids, mask = (to_device(array, model.device) for array in (input_ids_BT, mask_BT))
        first = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
    finally:
        handle.remove()
    return _of_chunks(model, given[0], first, len(tokens_N), step)


def sampled_tokens(generation: Generation, rows: slice, device: torch.device) -> Tensor:
    """Give the ids of some of the response tokens, int64."""
    tokens_R = generation.trace.token_ids_N[generation.sampled_N]
    return to_device(tokens_R[rows].astype(np.int64), device)


def inputs(trace: RoutingTrace) -> RoutingTrace:
    """Give what is put into the model: all but the last token of each sequence, whose logits nobody asks for."""
    # the engine never routed that token either, so every row that is left can be replayed, and counted ahead
    return trace.truncated(trace.lengths - 1)


def pad(trace: RoutingTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad tokens and mask, int64 [B, T], on the right, where the mask hides whatever token there is."""
    mask_BT = np.arange(int(trace.lengths.max())) < trace.lengths[:, None]
    input_ids_BT = np.zeros(mask_BT.shape, np.int64)
    input_ids_BT[mask_BT] = trace.token_ids_N
    return input_ids_BT, mask_BT.astype(np.int64)


def _of_chunks(model: Any, trunk: Any, first: Tensor, num_rows: int, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield logits: the first that the forward gave, then those of its own head on what its trunk gave."""
    yield slice(0, step), _widened(first)
    for start in range(step, num_rows, step):
        rows = slice(start, start + step)
        outputs = replace(trunk, last_hidden_state=trunk.last_hidden_state[:, rows])
        # the whole forward runs, since a family may scale or cap what its head gives
        with overridden(model.base_model, "forward", lambda *_, outputs=outputs, **__: outputs):
            tokens = torch.zeros(outputs.last_hidden_state.shape[:2], dtype=torch.int64, device=model.device)
            yield rows, _widened(model(input_ids=tokens, use_cache=False).logits[0])


def _widened(logits_RV: Tensor) -> Tensor:
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
