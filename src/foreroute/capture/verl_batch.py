"""Reads the routes of a batch of verl, ms-swift or SkyRL: padded or packed rows, where zeros stand for "never routed".

`foreroute.trainers.verl` reads verl's own tensors by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import as_integers
from foreroute.checks import as_array
from foreroute.errors import CaptureError


def sequences_of(fields: Mapping[str, Any]) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any]]]:
    """Give for each sequence of a batch: rows [T, layers, K], which of them were routed [T], and tokens [T].

    Fields are `routed_experts` [b, width, layers, K], `input_ids` and `attention_mask` [b, width]; without a mask,
    `position_ids` [b, width] are 0 where a sequence begins. With `seq_lens` [S] what is behind a sequence is padding,
    also where mask and positions count it or start anew. A row of -1 throughout counts as routed in what is given.
    """
    by = "position_ids" if fields.get("attention_mask") is None else "attention_mask"
    if missing := [name for name in ("routed_experts", "input_ids", by) if fields.get(name) is None]:
        raise CaptureError(
            f"the batch lacks {', '.join(missing)}; expected routed_experts [b, T, layers, K], input_ids [b, T], and "
            "attention_mask [b, T], or position_ids [b, T] of a batch that is packed"
        )
    routes, tokens = (as_integers(fields[name], name) for name in ("routed_experts", "input_ids"))
    found_by = as_array(fields[by], name=by, error=CaptureError)
    if routes.ndim != 4 or tokens.shape != routes.shape[:2] or found_by.shape != tokens.shape:
        raise CaptureError(
            f"routed_experts has shape {routes.shape}, input_ids {tokens.shape}, {by} {found_by.shape}; "
            "expected [b, T, layers, K], [b, T] and [b, T]"
        )
    # whatever stands for no route, in padding too: no row of a router holds expert 0 alone, but with one pick
    routed_BT = routes.max(axis=(2, 3), initial=0) > 0
    lengths_S = None if fields.get("seq_lens") is None else as_integers(fields["seq_lens"], "seq_lens").astype(np.int64)
    if by == "attention_mask":
        places = [*enumerate(kept_by_mask(found_by))]
    elif lengths_S is None:
        places = [(row, kept) for row, positions in enumerate(found_by) for kept in packed_places(positions)]
    else:
        ends = [
            (row, *np.flatnonzero(positions == 0).tolist(), len(positions)) for row, positions in enumerate(found_by)
        ]
        places = [(row, slice(*pair)) for row, *each in ends for pair in pairwise(each)]
        places = without_padding(lengths_S.reshape(-1).tolist(), places, routed_BT)
    if lengths_S is not None:
        places = cut_to(lengths_S, places)
        left_out_BT = routed_BT.copy()
        for b, kept in places:
            left_out_BT[b, kept] = False
            positions_T = np.arange(kept.stop - kept.start)
            left_out_BT[b] |= by == "position_ids" and not np.array_equal(found_by[b, kept], positions_T)
        if left_out_BT.any():
            raise CaptureError(
                f"seq_lens are {lengths_S[:8].tolist()}, and there are routes outside of these tokens, or their "
                "position_ids do not count from 0; pass those of the same batch"
            )
    last_routed_S = np.array([kept.stop > kept.start and routed_BT[b, kept.stop - 1] for b, kept in places])
    ends_unrouted = any(
        routed_BT[b, kept].any() and not last for (b, kept), last in zip(places, last_routed_S, strict=True)
    )
    for s, (b, kept) in enumerate(places):
        rows_TAK = routes[b, kept]
        # The last token was sampled and never an input, so that a rollout has no route for it. A route there is the one
        # sign of rows that are shifted by one: what its layers and picks agree on says nothing, as with one layer. A
        # sequence that verl cut at the width of the batch has one, and is told by others that end without.
        is_cut = by == "attention_mask" and ends_unrouted and kept.stop == tokens.shape[1]
        if last_routed_S[s] and not is_cut:
            raise CaptureError(
                f"sequence {s} has routes for its last token, {rows_TAK[-1, 0].tolist()} in the first layer, which no "
                "sampling engine computes; expected zeros there, but where the batch's width cuts some sequences and "
                "not all. The rows are shifted: check input_ids and the mask"
            )
        yield rows_TAK, routed_rows(rows_TAK, s), tokens[b, kept]


def packed_places(positions_T: NDArray[Any]) -> list[slice]:
    """Find where sequences lie that are packed into one row, by positions that count from 0 to the end of each."""
    starts, width = np.flatnonzero(positions_T == 0), len(positions_T)
    lengths = np.diff(starts, append=width)
    # what stands before the first start is repeated for none of them
    counted_T = np.arange(width - lengths.sum(), width) - np.repeat(starts, lengths)
    if positions_T.dtype.kind not in "iu" or not np.array_equal(positions_T, counted_T):
        raise CaptureError(
            f"position_ids are {positions_T[:8].tolist()}...; expected whole numbers that count from 0 in each sequence"
        )
    if (lengths == 1).any():
        raise CaptureError(
            f"position_ids have a 0 before another 0 or at the end of a row ({positions_T[:8].tolist()}...), as "
            "padding has, and no sequence of two tokens; pass attention_mask or seq_lens, or cut the padding off"
        )
    return [slice(int(start), int(start + length)) for start, length in zip(starts, lengths, strict=True)]


def without_padding(
    lengths: list[int], places: list[tuple[int, slice]], routed_BT: NDArray[np.bool_]
) -> list[tuple[int, slice]]:
    """Leave out places that are padding, as they have no route, stand behind all routes of a row, and fit no length."""
    routes_ahead_BT = np.logical_or.accumulate(routed_BT[:, ::-1], axis=1)[:, ::-1]
    kept: list[tuple[int, slice]] = []
    for number, (b, at) in enumerate(places):
        if len(kept) == len(lengths):
            break
        may_be_padding = len(places) - number > len(lengths) - len(kept) and not routes_ahead_BT[b, at.start]
        if not may_be_padding or lengths[len(kept)] == at.stop - at.start:
            kept.append((b, at))
    return kept


def cut_to(lengths_S: NDArray[np.int64], places: list[tuple[int, slice]]) -> list[tuple[int, slice]]:
    """Cut the place of each sequence to its length."""
    rooms_S = np.array([kept.stop - kept.start for _, kept in places])
    if lengths_S.shape != rooms_S.shape or ((lengths_S < 1) | (lengths_S > rooms_S)).any():
        raise CaptureError(
            f"seq_lens are {lengths_S[:8].tolist()}, and attention_mask or position_ids have sequences of up to "
            f"{rooms_S[:8].tolist()} tokens; expected at least as many. Pass those of the same batch"
        )
    return [(b, slice(at.start, at.start + n)) for (b, at), n in zip(places, lengths_S.tolist(), strict=True)]


def kept_by_mask(mask_BT: NDArray[Any]) -> list[slice]:
    """Find where the tokens of each sequence lie in a padded batch, by a mask with padding at both ends alone."""
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
    """Say which rows, integers [T, layers, K], were routed, where zeros fill those that were not: bool [T].

    Zeros before a routed row are refused, and with one pick all but those of the last row: they may be expert 0.
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
            "they belong to another sequence; where several are packed into a row, leave the mask out and give "
            "position_ids"
        )
    return routed_T
