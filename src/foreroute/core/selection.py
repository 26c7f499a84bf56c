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
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .errors import ReplayError
from .passes import LayerPass, RouterHook

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
        own_RK: int64 [R, K], what the router picks by itself.
        by_probability: whether it selected by probabilities, and not by logits.
    """

    scores_RE: Tensor
    ids_RK: Tensor
    own_RK: Tensor
    by_probability: bool = False


class SelectionMode(TorchFunctionMode):
    """Watches one call of a router that selects by top-k. Other routers have a subclass in `selection_rules`.

    Args:
        final: which top-k of the call is the final selection, from 0; None where that is not known yet.
        now: what the router does in this pass; None to look on only.

    Attributes:
        seen: every selection so far, in order.
    """

    def __init__(self, final: int | None, now: LayerPass | None = None) -> None:
        super().__init__()
        self.final = final
        self.now = now
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
        """Runs every torch function of the router by `call`."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function: of the final top-k, in our way."""
        if func in TOP_K:
            return self._top_k(func, args, kwargs)
        self._squashed = self._squashed or func in SQUASHING
        return self.masked.run(func, args, kwargs)

    def _top_k(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {name: kwargs[name] for name in kwargs if name != "input"}
        scores = args[0]
        now = self.now if len(self.seen) == self.final else None
        if now is None or now.ids_RK is None:
            result = func(*args, **kwargs)
            ids_RK = _flat(result.indices)
            self.seen.append(Selection(_flat(scores), ids_RK, ids_RK, self._squashed))
            if now is not None:
                now.keep(ids_RK)
            return result
        own = func(scores.detach(), *args[1:], **kwargs).indices if asks(now) else None
        ids = self.chosen(scores, own)
        return torch.return_types.topk((self.masked.before_masking(scores).gather(-1, ids), ids))

    def chosen(self, scores: Tensor, own: Tensor | None) -> Tensor:
        """The experts to run, int64 [..., K], noted as seen.

        Args:
            scores: [..., E], what the router selects by.
            own: its own selection, integers [..., K]; None if it was not asked.
        """
        assert self.now is not None, "somebody decides"
        ids_RK, own_RK = self.now.choose(None if own is None else _flat(own))
        self.seen.append(Selection(_flat(scores), ids_RK, own_RK, self._squashed))
        return ids_RK.view(*scores.shape[:-1], ids_RK.shape[-1])


def asks(now: LayerPass) -> bool:
    """Whether a router is to select by itself: not in a recomputation, unless in a graph, which is one for both."""
    return not now.again or torch.compiler.is_compiling()


def _flat(tensor: Tensor) -> Tensor:
    """[..., E] as [R, E]: some routers keep batch and token axes apart."""
    if tensor.ndim > 2:
        return tensor.flatten(0, -2)
    return tensor if tensor.ndim == 2 else tensor[None]


@dataclass(frozen=True)
class SelectionRule:
    """How one class of router selects.

    Attributes:
        mode: what watches and forces its selection.
        num_skip_classes: how many of its last ids stand for no expert at all.
        is_lookup: whether the selection is a function of the token alone; it is checked and never forced.
        read_back: the ids in what it hands on, [R, K] in ascending order, where they are not there as they are.
    """

    mode: type[SelectionMode] = SelectionMode
    num_skip_classes: int = 0
    is_lookup: bool = False
    read_back: Callable[[Any], Tensor] | None = None


class SelectingRouter(RouterHook):
    """The hook on one router.

    Args:
        path: dotted name inside the model.
        rule: how it selects.
        selecting: the module and the name of its method in which the selection is made.
        num_experts: E.
        top_k: its number of picks.
        final: which top-k of its forward is its selection.
    """

    def __init__(
        self,
        path: str,
        rule: SelectionRule,
        selecting: tuple[nn.Module, str],
        num_experts: int,
        top_k: int,
        final: int,
    ) -> None:
        super().__init__(path, selecting, num_experts, top_k)
        self.rule = rule
        self.final = final

    def select(self, now: LayerPass, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `RouterHook`."""
        mode = self.rule.mode(self.final, now)
        with mode:
            result = forward(*args, **kwargs)
        if len(mode.seen) != self.final + 1:
            raise ReplayError(
                f"router {self.path} made {len(mode.seen)} top-k selections, but {self.final + 1} when it was "
                "attached; its forward takes another path now. Attach again"
            )
        seen = mode.seen[-1]
        if now.scores_into is not None:
            now.keep_scores(seen.scores_RE, seen.own_RK, by_probability=seen.by_probability)
        if torch.compiler.is_compiling() or (now.weights_into is None and now.weights_RK is None):
            return result
        return with_gate_weights(self.path, result, now, regroups=self.rule.read_back is not None)


def with_gate_weights(path: str, output: Any, now: LayerPass, *, regroups: bool) -> Any:
    """What a router returned, with the weights to force in the slots that have a route.

    Args:
        path: of the router.
        output: what it returned.
        now: what it does in this pass.
        regroups: whether it hands its picks on in another order than that of tokens.

    Raises:
        ReplayError: when gate weights are recorded or replayed, and the router does not hand on one for each pick.
    """
    parts = list(enumerate(output)) if isinstance(output, tuple | list) else [(None, output)]
    found = [
        (place, part)
        for place, part in parts
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and part.numel() == now.own_RK.numel()
        and part.shape[-1] == now.own_RK.shape[-1]
    ]
    if len(found) != 1 or regroups:
        handed = f"hands on {len(found) or 'no'} tensors of one number per pick"
        what = "regroups its picks" if regroups else handed
        raise ReplayError(
            f"router {path} {what}; expected one tensor of gate weights [tokens, K]. The gate weights of this "
            "family can be neither recorded nor replayed; leave gate_weights out"
        )
    place, own = found[0]
    weights = now.gate_weights(own)
    if weights is own:
        return output
    return weights if place is None else _put(output, place, weights)


def _put(output: Any, place: int, weights: Tensor) -> Any:
    parts = [weights if number == place else part for number, part in enumerate(output)]
    if hasattr(output, "_fields"):
        return type(output)(*parts)
    return type(output)(parts)


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
    """Which scores a masked tensor was made from. Follows the tensors of one router call.

    Routers that limit the selection to groups of experts overwrite the scores of the others, and some of them take gate
    weights from the overwritten tensor. An expert replayed from outside the live groups would get weight zero and no
    gradient; so the weights are gathered from the tensor before the mask. Upstream masks with `masked_fill`; the other
    ways of writing the same (in place, `where`, a product with a 0/1 mask, a sum with a mask of minus infinities) are
    known here too. What is written in yet another way is caught when a model is attached: a replayed expert must not
    have weight zero.
    """

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
