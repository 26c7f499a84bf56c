"""Routes as integer tensors [B, T, L, K], checked on their device: what is wrong takes no effect, and is told late.

Letters: B, T rows and positions of the batch, L routers, K picks, E experts.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from .errors import ReplayError
from .passes import Rows, to_device
from .trunk import TrunkHooks

Missing = Literal["native", "error"]
"""What to do with rows of -1 that are neither padding nor the last of their sequence."""
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


class TensorRows(NamedTuple):
    """Routes of a batch on the device, to be replayed as often as wanted. Made by `Routed.rows`."""

    ids_LBTK: Tensor  # as `Rows.ids_LRK`; rows with a fault are -1
    faults: Tensor  # int64 [4], how many rows have each of `FAULTS`

    @classmethod
    def made(cls, hooks: TrunkHooks, ids: Tensor, mask: Tensor | None, missing: Missing) -> TensorRows:
        """Check ids [B, T, L, K] against routers, on the device. Raises `ReplayError` for shapes and types."""
        if missing not in get_args(Missing):
            raise ReplayError(f"missing is {missing!r}; expected one of {get_args(Missing)}")
        routers, top_k = hooks.routers, int(hooks.sizes_2L[1].max())
        if not isinstance(ids, Tensor) or ids.ndim != 4 or ids.dtype not in INTEGERS:
            raise ReplayError(f"ids are {_described(ids)}; expected integers [B, T, L, K]")
        if ids.shape[2:] != (len(routers), top_k):
            raise ReplayError(
                f"ids have [L, K] = {list(ids.shape[2:])}; the model has {len(routers)} routers of at most {top_k} "
                f"picks, from {routers[0].path} to {routers[-1].path}"
            )
        if mask is not None and mask.shape != ids.shape[:2]:
            raise ReplayError(f"attention_mask is {list(mask.shape)}, ids are {list(ids.shape)} [B, T, L, K]")
        device = hooks.device or ids.device
        ids_LBTK = _signed(to_device(ids, device)).permute(2, 0, 1, 3)
        real_BT = torch.ones(ids.shape[:2], dtype=torch.bool, device=device)
        if mask is not None:
            real_BT = to_device(mask, device) != 0
        num_experts_L, top_k_L = to_device(hooks.sizes_2L, device)[..., None, None]
        is_pick = torch.arange(top_k, device=device) < top_k_L[..., None]
        given = (ids_LBTK >= 0) & is_pick & real_BT[..., None]
        num_given = given.sum(-1)
        routed = num_given == top_k_L
        too_large = ((ids_LBTK >= num_experts_L[..., None]) & given).any(-1)
        # equal ids are neighbours when sorted; -1, -2, ... in the place of what is not given are equal to nothing
        fillers = -1 - torch.arange(top_k, device=device)
        ordered = torch.where(given, ids_LBTK.long(), fillers).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        in_part = (num_given > 0) & ~routed
        wrong = too_large | twice | in_part
        lacking = torch.zeros_like(real_BT)
        if missing == "error":  # the last real position of a sequence is before no other
            has_later = real_BT.flip(1).cumsum(1).flip(1) > 1
            lacking = (num_given == 0).any(0) & real_BT & has_later
        faults = torch.stack(list(map(Tensor.sum, (too_large, twice, in_part, lacking))))
        is_forced = (routed & ~wrong)[..., None] & is_pick
        return cls(torch.where(is_forced, ids_LBTK, -1).to(hooks.id_dtype), faults)

    def of(self, first: int, num: int) -> Rows:
        """Give the rows of positions from `first` on; behind the last one there is no route."""
        ids_LBTK = self.ids_LBTK[:, :, first : first + num]
        if lacking := num - ids_LBTK.shape[2]:
            ids_LBTK = functional.pad(ids_LBTK, (0, 0, 0, lacking), value=-1)
        return Rows(ids_LBTK.flatten(1, 2))

    def raise_faults(self) -> None:
        """Raise `ReplayError` if a row had a fault. Waits for the device."""
        totals = zip(self.faults.cpu().tolist(), FAULTS, strict=True)
        said = ", ".join(f"{total} {what}" for total, what in totals if total)
        if said:
            raise ReplayError(
                f"the routes had {said}; the model routed these rows itself. Mend the ids that are replayed"
            )


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _signed(ids: Tensor) -> Tensor:
    """Give the same ids in a type that has -1. What -1 became in an unsigned type, in all of several picks, is -1."""
    if ids.dtype not in UNSIGNED:
        return ids
    wide = ids.to(UNSIGNED[ids.dtype])
    was_minus_one = wide == (-1 if ids.dtype == torch.uint64 else torch.iinfo(ids.dtype).max)
    wide = wide.where(wide >= 0, torch.iinfo(wide.dtype).max)  # what int64 does not hold is above all ids
    # with one pick, 255 may be the expert of that number
    return wide.masked_fill(was_minus_one.all(-1, keepdim=True), -1) if ids.shape[-1] > 1 else wide
