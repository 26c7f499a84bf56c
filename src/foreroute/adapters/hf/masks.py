"""Which scores a masked tensor was made from.

Routers that limit the selection to groups of experts overwrite the scores of the others, and some of them take gate
weights from the overwritten tensor. An expert replayed from outside the live groups would get weight zero and no
gradient; so the weights are gathered from the tensor before the mask. Upstream masks with `masked_fill`; the other ways
of writing the same (in place, `where`, a product with a 0/1 mask, a sum with a mask of minus infinities) are known here
too. What is written in yet another way is caught when a model is attached: a replayed expert must not have weight zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FILLING = frozenset({torch.masked_fill, Tensor.masked_fill})
FILLING_IN_PLACE = frozenset({Tensor.masked_fill_, Tensor.__setitem__})
CHOOSING = frozenset({torch.where, Tensor.where})
COMBINING = frozenset(
    {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
)
CONSTANT = frozenset(
    {
        *(torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like),
        *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full),
    }
)


class MaskedScores:
    """Follows the tensors of one router call."""

    def __init__(self) -> None:
        # pairs (tensor, what it was); the tensors are held, so that identity stays meaningful
        self._sources: list[tuple[Tensor, Tensor]] = []
        self._constants: list[Tensor] = []

    def before_masking(self, scores: Tensor) -> Tensor:
        """The tensor that `scores` was masked from, or `scores` itself."""
        for masked, source in self._sources:
            if masked is scores:
                return source
        return scores

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function and remember what it masked."""
        if func in FILLING_IN_PLACE and args[0].is_floating_point():
            source = self.before_masking(args[0]).clone()
            result = func(*args, **kwargs)
            self._sources.insert(0, (args[0], source))
            return result
        result = func(*args, **kwargs)
        if func in CONSTANT or (self._constants and self._made_of_constants(result, args)):
            self._constants.append(result)
        elif func in FILLING:
            self._sources.append((result, self.before_masking(args[0])))
        elif func in CHOOSING or func in COMBINING:
            self._remember_operand(result, args)
        return result

    def _made_of_constants(self, result: Any, args: tuple[Any, ...]) -> bool:
        """Whether a float tensor was made of masks alone: zeros, ones, comparisons, indices, and views of them."""
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return False
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        return bool(tensors) and all(self._is_constant(tensor) for tensor in tensors)

    def _is_constant(self, tensor: Tensor) -> bool:
        return not tensor.is_floating_point() or any(tensor is constant for constant in self._constants)

    def _remember_operand(self, result: Tensor, args: tuple[Any, ...]) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        live = [tensor for tensor in tensors if not self._is_constant(tensor) and tensor.shape == result.shape]
        if len(live) == 1 and len(tensors) > 1 and all(t is live[0] or self._is_constant(t) for t in tensors):
            self._sources.append((result, self.before_masking(live[0])))
