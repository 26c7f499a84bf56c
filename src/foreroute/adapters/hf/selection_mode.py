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
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foreroute.replay import ReplayRows, forced_selection

TOP_K = frozenset({torch.topk, Tensor.topk})
SQUASHING = frozenset(
    {torch.softmax, Tensor.softmax, functional.softmax, torch.sigmoid, Tensor.sigmoid, functional.sigmoid}
)
MASKING = frozenset({torch.masked_fill, Tensor.masked_fill})


@dataclass(frozen=True)
class Selection:
    """One top-k as it was executed.

    Attributes:
        scores_RE: [R, E], what was selected by.
        ids_RK: int64 [R, K], the experts that were selected, forced or not.
        own_ids_RK: int64 [R, K], what the router picks by itself; None where it was forced and not asked.
        by_probability: whether it selected by probabilities, and not by logits.
    """

    scores_RE: Tensor
    ids_RK: Tensor
    own_ids_RK: Tensor | None
    by_probability: bool = False


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
        self._squashed = False
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
        self._squashed = self._squashed or func in SQUASHING
        result = func(*args, **kwargs)
        if func in MASKING:
            # the result is held so that its id is not reused
            self._unmasked[id(result)] = (self._before_masking(args[0]), result)
        return result

    def _select(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0] if args else kwargs["input"]
        if self.rows is None or len(self.seen) != self.final:
            result = func(*args, **kwargs)
            self.seen.append(Selection(scores, result.indices, result.indices, self._squashed))
            return result
        dense = self._before_masking(scores)
        values, ids, own_ids = forced_selection(
            scores,
            dense,
            self.rows,
            self.layer,
            lambda own_scores: func(own_scores, *args[1:], **kwargs).indices,
        )
        self.seen.append(Selection(scores, ids, own_ids, self._squashed))
        return torch.return_types.topk((values, ids))

    def _before_masking(self, scores: Tensor) -> Tensor:
        known = self._unmasked.get(id(scores))
        return scores if known is None else known[0]
