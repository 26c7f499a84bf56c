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

from foreroute.adapters.hf.masks import MaskedScores
from foreroute.replay import ReplayRows, forced_selection

TOP_K = frozenset({torch.topk, Tensor.topk})
SQUASHING = frozenset(
    {torch.softmax, Tensor.softmax, functional.softmax, torch.sigmoid, Tensor.sigmoid, functional.sigmoid}
)


@dataclass(frozen=True)
class Selection:
    """One selection as it was executed.

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
    """Watches one call of a router that selects by top-k. Routers that select otherwise have a subclass in `plans`.

    Args:
        final: which top-k of the call is the final selection, from 0; None where that is not known yet.
        rows: the routes to force, those of this router alone, or None to watch only.

    Attributes:
        seen: every selection so far, in order.
    """

    def __init__(self, final: int | None, rows: ReplayRows | None = None) -> None:
        super().__init__()
        self.final = final
        self.rows = rows
        self.seen: list[Selection] = []
        self._squashed = False
        self.masked = MaskedScores()

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
            return self._top_k(func, args, kwargs)
        self._squashed = self._squashed or func in SQUASHING
        return self.masked.run(func, args, kwargs)

    def _top_k(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {name: kwargs[name] for name in kwargs if name != "input"}
        scores = args[0]
        if self.rows is None or len(self.seen) != self.final:
            result = func(*args, **kwargs)
            ids_RK = _flat(result.indices)
            self.seen.append(Selection(_flat(scores), ids_RK, ids_RK, self._squashed))
            return result
        values, ids = self.forced(scores, lambda own_scores: func(own_scores, *args[1:], **kwargs).indices)
        return torch.return_types.topk((values, ids))

    def forced(self, scores: Tensor, own_choice: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The replayed selection by `scores` [..., E], noted as seen.

        Returns:
            The scores [..., K] before masking at the replayed ids, and the ids, int64 [..., K].
        """
        if self.rows is None:
            raise AssertionError("there are no routes to force")
        dense_RE = _flat(self.masked.before_masking(scores))
        values_RK, ids_RK, own_ids_RK = forced_selection(_flat(scores), dense_RE, self.rows, 0, own_choice)
        self.seen.append(Selection(_flat(scores), ids_RK, own_ids_RK, self._squashed))
        shape = (*scores.shape[:-1], ids_RK.shape[-1])
        return values_RK.view(shape), ids_RK.view(shape)


def _flat(tensor: Tensor) -> Tensor:
    """[..., E] as [R, E]: some routers keep batch and token axes apart."""
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])
