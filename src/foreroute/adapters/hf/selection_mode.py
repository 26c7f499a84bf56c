"""Seeing and replacing the selection inside a router's own forward.

A router's forward runs unchanged; a `TorchFunctionMode` around it watches for its final top-k. What precedes
(projection, softmax, bias, group limits) and what follows (gathering, renormalising, scaling, casting) stays the
family's own code, so that no gate formula is written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from foreroute.replay import ReplayRows, forced_selection

TOP_K = frozenset({torch.topk, Tensor.topk})
MASKING = frozenset({torch.masked_fill, Tensor.masked_fill})


@dataclass(frozen=True)
class Selection:
    """One top-k as it was executed.

    Attributes:
        scores_RE: [R, E], what was selected by.
        ids_RK: int64 [R, K], the experts that were selected, forced or not.
    """

    scores_RE: Tensor
    ids_RK: Tensor


class SelectionMode(TorchFunctionMode):
    """Watches one call of a router.

    Args:
        final: which top-k of the call is the final selection, from 0; None where that is not known yet.
        rows: the routes to force, or None to watch only.
        layer: the position of the router on the layer axis.

    Attributes:
        seen: every top-k so far, in order.
    """

    def __init__(self, final: int | None, rows: ReplayRows | None = None, layer: int = 0) -> None:
        super().__init__()
        self.final = final
        self.rows = rows
        self.layer = layer
        self.seen: list[Selection] = []
        self._unmasked: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs every torch function of the router, and the final top-k in our way."""
        kwargs = kwargs or {}
        if func in TOP_K:
            return self._select(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in MASKING:
            # the result is held so that its id is not reused
            self._unmasked[id(result)] = (self._before_masking(args[0]), result)
        return result

    def _select(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0] if args else kwargs["input"]
        if self.rows is None or len(self.seen) != self.final:
            result = func(*args, **kwargs)
            self.seen.append(Selection(scores, result.indices))
            return result
        dense = self._before_masking(scores)
        values, ids = forced_selection(
            scores,
            dense,
            self.rows.ids_LRK[self.layer],
            self.rows.unrouted_Q,
            lambda own_scores: func(own_scores, *args[1:], **kwargs).indices,
        )
        self.seen.append(Selection(scores, ids))
        return torch.return_types.topk((values, ids))

    def _before_masking(self, scores: Tensor) -> Tensor:
        known = self._unmasked.get(id(scores))
        return scores if known is None else known[0]
