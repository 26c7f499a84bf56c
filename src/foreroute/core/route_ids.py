"""Ids of experts as they are given: integers of any type, -1 where a row has no route, and what can be wrong with them.

They are checked on the device. Nothing waits for it until somebody asks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import ReplayError

UNSIGNED = {
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Types without -1, and those that hold their ids beside it."""
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)
FAULTS = (
    "rows with an id out of range",
    "rows with an expert twice",
    "rows with -1 beside experts",
    "rows of -1 that later tokens depend on",
)


def find_faults(ids: Tensor, given: Tensor, num_experts: Tensor | int) -> tuple[Tensor, Tensor]:
    """Find rows with an id out of range, and rows with an expert twice: bool [...] each.

    Args:
        ids: signed integers [..., K].
        given: bool [..., K], those that are looked at.
        num_experts: of the router.
    """
    too_large = ((ids >= num_experts) & given).any(-1)
    # equal ids are neighbours when sorted; -1, -2, ... in the place of what is not given are equal to nothing
    fillers = -1 - torch.arange(ids.shape[-1], device=ids.device)
    ordered = torch.where(given, ids.long(), fillers).sort(-1).values
    return too_large, (ordered[..., 1:] == ordered[..., :-1]).any(-1)


def raise_faults(faults: Tensor, effect: str) -> None:
    """Raise `ReplayError` if rows had a fault, of which int64 [F] says how many. Waits for the device."""
    totals = zip(faults.cpu().tolist(), FAULTS, strict=False)
    said = ", ".join(f"{total} {what}" for total, what in totals if total)
    if said:
        raise ReplayError(f"the routes had {said}; {effect}. Mend the ids that are replayed")


def described(value: Any) -> str:
    """Type and shape, for messages."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def signed(ids: Tensor) -> Tensor:
    """Give the same ids in a type that has -1, also where it became another number in all of several picks."""
    if ids.dtype not in UNSIGNED:
        return ids
    wide = ids.to(UNSIGNED[ids.dtype])
    was_minus_one = wide == (-1 if ids.dtype == torch.uint64 else torch.iinfo(ids.dtype).max)
    wide = wide.where(wide >= 0, torch.iinfo(wide.dtype).max)  # what int64 does not hold is above all ids
    # with one pick, 255 may be the expert of that number
    return wide.masked_fill(was_minus_one.all(-1, keepdim=True), -1) if ids.shape[-1] > 1 else wide
