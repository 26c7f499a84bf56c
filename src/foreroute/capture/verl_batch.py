"""The routes of a batch of verl: padded rows, where zeros stand for "never routed".

`foreroute.trainers.verl` reads verl's own tensors by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import as_array, as_integers
from foreroute.errors import CaptureError


def sequences_of(fields: Mapping[str, Any]) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any]]]:
    """Give for each sequence of a padded batch: rows [T, layers, K], which of them were routed [T], and tokens [T].

    A row of -1 throughout, which verl never writes, counts as routed here; `decode` takes it as not recorded.

    Args:
        fields: `routed_experts` [b, width, layers, K], `input_ids` and `attention_mask` [b, width]; None where missing.

    Raises:
        CaptureError: when a field is missing, shapes disagree, or rows of zeros stand where none can be.
    """
    if missing := [name for name, value in fields.items() if value is None]:
        raise CaptureError(
            f"the batch lacks {', '.join(missing)}; expected routed_experts [b, T, layers, K], input_ids and "
            "attention_mask [b, T]"
        )
    routes, tokens = (as_integers(fields[name], name) for name in ("routed_experts", "input_ids"))
    mask = as_array(fields["attention_mask"], "attention_mask")
    if routes.ndim != 4 or tokens.shape != routes.shape[:2] or mask.shape != tokens.shape:
        raise CaptureError(
            f"routed_experts has shape {routes.shape}, input_ids {tokens.shape}, attention_mask {mask.shape}; "
            "expected [b, T, layers, K], [b, T] and [b, T]"
        )
    places = kept_by_mask(mask)
    last_routed_S = np.array(
        [kept.stop > kept.start and (routes[s, kept.stop - 1] > 0).any() for s, kept in enumerate(places)]
    )
    ends_unrouted = any(routes[s, kept].any() and not last_routed_S[s] for s, kept in enumerate(places))
    for s, kept in enumerate(places):
        rows_TAK = routes[s, kept]
        # The last token was sampled and never an input, so that a rollout has no route for it. A route there is the one
        # sign of rows that are shifted by one: what its layers and picks agree on says nothing, as with one layer. A
        # sequence that verl cut at the width of the batch has one, and is told by others that end without.
        if last_routed_S[s] and not (ends_unrouted and kept.stop == mask.shape[1]):
            raise CaptureError(
                f"sequence {s} has routes for its last token, {rows_TAK[-1, 0].tolist()} in the first layer, which no "
                "sampling engine computes; expected zeros there, but where the batch's width cuts some sequences and "
                "not all. The rows are shifted: check input_ids and the mask"
            )
        yield rows_TAK, routed_rows(rows_TAK, s), tokens[s, kept]


def kept_by_mask(mask_BT: NDArray[Any]) -> list[slice]:
    """Find where the tokens of each sequence lie in a padded batch.

    Raises:
        CaptureError: for a mask that is neither bool nor integers 0 and 1, and for one with padding between tokens.
    """
    if mask_BT.dtype.kind not in "biu" or ((mask_BT != 0) & (mask_BT != 1)).any():
        raise CaptureError(
            f"attention_mask is {mask_BT.dtype} and not of 0 and 1 alone; expected 1 for a token and 0 for padding"
        )
    mask = mask_BT.astype(np.bool_)
    counts, starts = mask.sum(axis=1), mask.argmax(axis=1) if mask.shape[1] else np.zeros(len(mask), np.int64)
    kept = [slice(int(start), int(start + count)) for start, count in zip(starts, counts, strict=True)]
    for sequence, tokens in enumerate(kept):
        if not mask[sequence, tokens].all():
            raise CaptureError(
                f"attention_mask of sequence {sequence} has padding between its tokens, at position "
                f"{tokens.start + int(np.argmin(mask[sequence, tokens]))}; expected padding at both ends alone. A row "
                "was dropped, or masks of two batches were mixed"
            )
    return kept


def routed_rows(rows_TAK: NDArray[Any], sequence: int) -> NDArray[np.bool_]:
    """Say which rows were routed, where zeros fill those that were not: bool [T].

    Args:
        rows_TAK: integers [T, layers, K], a row for each token.
        sequence: its number, for the message.

    Raises:
        CaptureError: when a row of zeros stands before a routed one, where verl writes none; and for any but the last
            row when K is 1, where zeros may be expert 0.
    """
    if rows_TAK.dtype.kind not in "iu":
        raise CaptureError(f"sequence {sequence} has routed_experts of dtype {rows_TAK.dtype}; expected integers")
    routed_T = np.asarray(rows_TAK.any(axis=(1, 2)), np.bool_)
    # the last row may be zeros in every model: its token was never an input
    certain = len(rows_TAK) - 1 if rows_TAK.shape[2] == 1 else len(rows_TAK)
    gap = int(np.argmin(routed_T)) if len(routed_T) and not routed_T.all() else certain
    if gap < certain and rows_TAK.shape[2] == 1:
        raise CaptureError(
            f"sequence {sequence} has a row of zeros at position {gap}, which in this form means 'never routed', but "
            "with top-1 routing it may as well be expert 0; decode the engine's own output instead"
        )
    if routed_T[gap:certain].any():
        raise CaptureError(
            f"sequence {sequence} has zeros and so no route at position {gap}, and one at position "
            f"{gap + int(np.argmax(routed_T[gap:]))}; expected zeros only at the end. The engine lost those rows, or "
            "they belong to another sequence"
        )
    return routed_T
