"""Switch Transformers: one expert per token, by `argmax`, weighted by the maximum of the probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.hf.selection_mode import Selection, SelectionMode

ARG_MAX = frozenset({torch.argmax, Tensor.argmax})
MAX = frozenset({torch.max, Tensor.max})


class ArgMaxMode(SelectionMode):
    """Forces the `argmax`, and lets the `max` that follows take its value there.

    Tokens over the capacity of their expert are dropped by the router as ever: the capacity is counted on the replayed
    experts.
    """

    _ids: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs every torch function of the router, and the two that select in our way."""
        kwargs = kwargs or {}
        if func in ARG_MAX:
            return self._arg_max(func, args, kwargs)
        if func in MAX and self._ids is not None:
            values = args[0].gather(-1, self._ids[..., None])[..., 0]
            return torch.return_types.max((values, self._ids))
        return func(*args, **kwargs)

    def _arg_max(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores: Tensor = args[0]
        if self.rows is None:
            ids: Tensor = func(*args, **kwargs)
            ids_R1 = ids.reshape(-1, 1)
            self.seen.append(Selection(scores.reshape(-1, scores.shape[-1]), ids_R1, ids_R1, by_probability=True))
            return ids
        self._squashed = True
        _, ids = self.forced(scores, lambda own_scores: own_scores.argmax(dim=-1, keepdim=True))
        self._ids = ids[..., 0]
        return self._ids
