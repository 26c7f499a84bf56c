"""The tokens that routes belong to: those that the output carries, checked against those that the caller states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arguments import as_array, is_array, items_of, shown
from foreroute.capture.containers import Payload
from foreroute.errors import CaptureError

MAX_INT32 = 2**31 - 1


def tokens_of(payloads: Sequence[Payload], token_ids: Any) -> list[NDArray[np.int32]]:
    """Prompt and response tokens of each payload, int32 [T].

    Args:
        payloads: S payloads; some forms carry their tokens.
        token_ids: the caller's, [T] for one sequence or S of them, or None.

    Raises:
        CaptureError: when nobody states the tokens, or the two statements differ.
    """
    stated = _stated(token_ids, payloads)
    return [_tokens(payload, given, s) for s, (payload, given) in enumerate(zip(payloads, stated, strict=True))]


def _stated(token_ids: Any, payloads: Sequence[Payload]) -> list[Any]:
    """The caller's tokens, one entry for each payload."""
    if token_ids is None:
        return [None] * len(payloads)
    if isinstance(token_ids, list | tuple):
        given = items_of(token_ids, "token_ids")
        if given and not isinstance(given[0], list | tuple) and not is_array(given[0]):
            given = [given]
    elif is_array(token_ids):
        array = as_array(token_ids, "token_ids")
        given = list(array) if array.ndim == 2 else [array]
    else:
        raise CaptureError(
            f"token_ids is a {type(token_ids).__name__}; expected integers [T], or a list of S such, prompt and "
            "response together"
        )
    if len(given) != len(payloads):
        raise CaptureError(f"got tokens of {len(given)} sequences for the routes of {len(payloads)}; expected as many")
    return given


def _tokens(payload: Payload, given: Any, sequence: int) -> NDArray[np.int32]:
    carried = _carried(payload, sequence)
    if given is None:
        if carried is None:
            raise CaptureError(
                f"the output does not carry the tokens of sequence {sequence}; pass token_ids=, prompt and response"
            )
        return carried
    stated = _as_tokens(given, sequence)
    if carried is not None and not np.array_equal(carried, stated):
        raise CaptureError(
            f"sequence {sequence} carries {len(carried)} tokens that differ from the {len(stated)} in token_ids; "
            "routes and tokens belong to different requests"
        )
    return stated


def _carried(payload: Payload, sequence: int) -> NDArray[np.int32] | None:
    if payload.token_ids is not None:
        return _as_tokens(payload.token_ids, sequence)
    halves = (payload.prompt_token_ids, payload.response_token_ids)
    if any(half is None for half in halves):
        return None  # one half alone says nothing about positions
    return np.concatenate([_as_tokens(half, sequence) for half in halves])


def _as_tokens(values: Any, sequence: int) -> NDArray[np.int32]:
    what = f"the tokens of sequence {sequence}"
    if isinstance(values, list | tuple):
        values = items_of(values, what)
        for place, value in enumerate(values):
            if type(value) is not int and not isinstance(value, np.integer):
                raise CaptureError(
                    f"token {place} of sequence {sequence} is the {type(value).__name__} {shown(value)}; expected an "
                    "integer"
                )
    elif not is_array(values):
        raise CaptureError(f"{what} are a {type(values).__name__}; expected a list of integers")
    tokens = as_array(values, what)
    if tokens.size == 0 and tokens.ndim == 1:
        return np.zeros(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > MAX_INT32:
        ids = f" from {tokens.min()} to {tokens.max()}" if tokens.size and tokens.dtype.kind in "iu" else ""
        raise CaptureError(
            f"{what} are {tokens.dtype} of shape {tokens.shape}{ids}; expected token ids [T], from 0 to {MAX_INT32}"
        )
    return tokens.astype(np.int32)
