"""PhiMoE: sparsemixer picks its two experts one after the other, each within a band below the best score.

For each pick the router finds the best score, closes out every expert further below it than a jitter allows, picks (the
best one in eval mode, a random one in training), and takes a softmax over the band. Under replay the picks are the
given ones, and an expert that is replayed from outside the band joins it; otherwise it would have weight zero. On the
router's own picks, which lie in the band, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.hf.masks import FILLING
from foreroute.adapters.hf.selection_mode import Selection, SelectionMode
from foreroute.errors import ReplayError

MAX = frozenset({torch.max, Tensor.max})
CLOSING_OUT = frozenset({torch.scatter, Tensor.scatter})


class SparseMixerMode(SelectionMode):
    """Follows the two picks through the operations of `sparsemixer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores: Tensor | None = None
        self._picks: list[Tensor] = []  # int64 [R, 1], one for each pick so far
        self._in_band = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs every torch function of the router; the picks and their bands in our way."""
        kwargs = kwargs or {}
        if func in FILLING and self._picks:
            scores, outside, value = args
            self._in_band = True
            return func(scores, outside.scatter(-1, self._picks[-1], False), value)
        if func in CLOSING_OUT:
            self._in_band = False
            return func(args[0], args[1], self._picks[-1], args[3])
        result = func(*args, **kwargs)
        if func not in MAX:
            return result
        if not self._in_band:  # the best score, and in eval mode the pick
            if self._scores is None:
                self._scores = args[0]
            self._picks.append(self._forced(result.indices))
            return torch.return_types.max((result.values, self._picks[-1]))
        if not kwargs.get("keepdim"):  # the random pick of training
            self._picks[-1] = self._forced(result.indices[:, None])
            return torch.return_types.max((result.values, self._picks[-1][:, 0]))
        return result

    def __exit__(self, *exc: Any) -> None:
        """Note the selection, complete only now."""
        super().__exit__(*exc)
        if self._scores is not None and len(self._picks) > 1:
            ids_RK = torch.cat(self._picks, dim=-1)
            own_ids_RK = ids_RK if self.rows is None else self._scores.detach().topk(2, dim=-1).indices
            self.seen.append(Selection(self._scores, ids_RK, own_ids_RK))

    def _forced(self, own_R1: Tensor) -> Tensor:
        if self.rows is None:
            return own_R1
        if len(own_R1) != len(self.rows.routed_R):
            raise ReplayError(
                f"the router selects for {len(own_R1)} rows; the batch has {len(self.rows.routed_R)} slots"
            )
        pick = len(self._picks) - self._in_band
        ids_R1 = self.rows.ids_LRK[0][:, pick : pick + 1].to(own_R1)
        return torch.where(self.rows.routed_R.to(own_R1.device)[:, None], ids_R1, own_R1)
