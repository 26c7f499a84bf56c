"""verl's log-probs of sampled tokens on the sets that they were drawn from, for a rollout that brings sampling masks.

verl has no field for them. Two tensors ride in its batches, one row for each sequence, and are split with it:

    sampling_mask_counts   integers [B, R], tokens in the set of each response token, 0 where it was not sampled
    sampling_mask_ids      integers [B, M], the sets joined, -1 behind the last

verl's FSDP engine makes log-probs of dense logits in one function. While `log_probs_on_sets` is open, another one takes
its place for the rows that have a set; entropy stays verl's, over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from verl.workers.engine.fsdp import transformer_impl

from foreroute.errors import CaptureError, ReplayError, TraceContentError
from foreroute.replay import masked_logprobs_of_logits, to_device
from foreroute.trace import DecisionStream
from foreroute.trainers.verl.protocol import response_lengths, sampled_mask

COUNTS, IDS = "sampling_mask_counts", "sampling_mask_ids"
LOG_PROBS = "logprobs_from_logits"


@contextmanager
def log_probs_on_sets(micro_batch: Any) -> Iterator[None]:
    """Have one `forward_step` of verl score sampled tokens on their sets, if the micro-batch has any.

    Raises:
        ReplayError: when no log-probs were made while it was open.
        CaptureError: when the fields do not belong together, or a trained token has no set.
        BatchMismatchError: when a set leaves out its token.
    """
    if micro_batch.get(COUNTS, None) is None:
        yield
        return
    counts_R, ids, rows = _sets(micro_batch)
    original, calls = getattr(transformer_impl, LOG_PROBS), 0

    def on_sets(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        nonlocal calls
        calls += 1
        try:
            masks = DecisionStream.from_sets(logits.shape[-1], counts_R > 0, counts_R, ids)
        except TraceContentError as error:
            raise CaptureError(f"{COUNTS} and {IDS} cannot be true: {error}") from error
        picked = to_device(rows, logits.device)
        # the gradient of all rows must not be written over the logits that ours is made from
        whole: Tensor = original(logits=logits, labels=labels, inplace_backward=False)
        chosen = masked_logprobs_of_logits(logits.index_select(0, picked), labels.index_select(0, picked), masks)
        return whole.index_copy(0, picked, chosen.to(whole.dtype))

    setattr(transformer_impl, LOG_PROBS, on_sets)
    try:
        yield
    finally:
        setattr(transformer_impl, LOG_PROBS, original)
    if not calls:
        raise ReplayError(f"verl made log-probs past {LOG_PROBS}, so that no sampling mask was replayed in them")


def _sets(batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The sizes of the sets, the ids of all, and the packed rows that they belong to."""
    lengths, trained = response_lengths(batch), sampled_mask(batch)
    ends = batch.get("input_ids").offsets()[1:].cpu().numpy()
    counts_BR, ids_BM = (np.asarray(batch.get(name).cpu().numpy(), np.int64) for name in (COUNTS, IDS))
    sizes, ids, rows = [], [], []
    for s, length in enumerate(lengths.tolist()):
        own, given = counts_BR[s, :length], ids_BM[s][ids_BM[s] >= 0]
        if len(own) < length or counts_BR[s, length:].any() or own.min(initial=0) < 0 or own.sum() != len(given):
            raise CaptureError(
                f"sequence {s} has sets of {own.tolist()[:16]} tokens in {COUNTS} for a response of {length}, and "
                f"{len(given)} tokens in {IDS}; expected a size for each token of the response, and as many ids"
            )
        if (trained[s] & (own == 0)).any():
            raise CaptureError(
                f"token {int((trained[s] & (own == 0)).argmax())} of the response of sequence {s} is trained on "
                "and has no sampling mask; record one for each sampled token, of all tokens if nothing was left out"
            )
        kept = np.flatnonzero(own)
        sizes.append(own[kept])
        ids.append(given)
        # the row before a token is the one that it was drawn from
        rows.append(ends[s] - length - 1 + kept)
    return np.concatenate(sizes), np.concatenate(ids), np.concatenate(rows)
