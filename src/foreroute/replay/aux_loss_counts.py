"""Selection that an auxiliary load-balancing loss counts.

The loss is handed the router logits, selects the top K of them again, and counts those: the model's own selection,
whatever was executed. That of transformers does so once the trunk is done, that of Megatron-Core in each router. Under
`counts="replayed"` its top-k gives the executed selection instead. The probabilities that the loss multiplies the
counts with stay live, and with them its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foreroute.core.selection import TOP_K
from foreroute.errors import ReplayError


class ExecutedCounts(TorchFunctionMode):
    """Mode for one forward of the whole model, or of one router, in which losses count the executed selection."""

    def __init__(self, executed: Callable[[], Tensor | None], sizes: tuple[int, int] | None) -> None:
        super().__init__()
        self._executed = executed  # ids [L, R, K], when they have been selected; None before
        self._sizes = sizes  # E and K of every router; None where they differ, which no loss takes
        self._used = 0  # layers of them

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run everything as it is, but for a top-k of router probabilities after the selection."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        ids = self._next_ids(scores, result.indices)
        return result if ids is None else torch.return_types.topk((scores.gather(-1, ids), ids))

    def _next_ids(self, scores: Tensor, native_ids: Tensor) -> Tensor | None:
        """Give the ids that this top-k is to return; None where it is no selection of the loss."""
        executed = self._executed()
        if executed is None or (scores.shape[-1], native_ids.shape[-1]) != self._sizes:
            return None
        # a loss selects for one layer after the other, or for all of them joined
        if scores.shape[0] == executed.shape[1] and self._used < len(executed):
            chosen = executed[self._used]
            self._used += 1
        elif scores.shape[0] == executed.shape[0] * executed.shape[1] and not self._used:
            chosen = executed.flatten(0, 1)
            self._used = len(executed)
        else:
            return None
        return chosen.to(device=scores.device, dtype=torch.int64)

    def require_counted(self, *, has_loss: bool) -> None:
        """Raise `ReplayError` if there is an auxiliary loss, and it was made of something else than was executed."""
        executed = self._executed()
        if has_loss and executed is not None and self._used != len(executed):
            raise ReplayError(
                f"the auxiliary loss of this model selects {self._used} times where it has {len(executed)} routers, so "
                'that it cannot be told to count the replayed selection; replay with counts="native"'
            )
