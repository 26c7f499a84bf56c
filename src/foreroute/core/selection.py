"""Seeing and replacing the selection inside a router's own forward.

A router's forward runs unchanged; a `TorchFunctionMode` around it watches for its final top-k. What precedes
(projection, softmax, bias, group limits) and what follows (gathering, renormalising, scaling, casting) stays the
family's own code, so that no gate formula is written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .errors import ReplayError

if TYPE_CHECKING:
    from .passes import Rows

TOP_K = frozenset({torch.topk, Tensor.topk})
SQUASHING = frozenset(
    {torch.softmax, Tensor.softmax, functional.softmax, torch.sigmoid, Tensor.sigmoid, functional.sigmoid}
)


@dataclass(frozen=True)
class Scores:
    """What routers selected by: a tensor each for all L of them, or for one without that axis.

    Attributes:
        picked: float32 [L, R, K], of what they pick by themselves.
        next: float32 [L, R], the best of the others; of the last pick where all experts are picked.
        by_probability: bool [L], whether they select by probabilities, and not by logits.
    """

    picked: Tensor
    next: Tensor
    by_probability: Tensor

    def margin(self) -> Tensor:
        """float32 [L, R], the K-th minus the (K+1)-th score, in a router's own scale; 0 where it picks all."""
        return self.picked.amin(-1) - self.next

    def tensors(self) -> list[Tensor]:
        """In the order of the attributes."""
        return [self.picked, self.next, self.by_probability]


@dataclass(frozen=True, eq=False)
class LayerPass:
    """What one router does in one pass.

    Attributes:
        path: of the router, for messages.
        layer: its place in the stack.
        again: whether it is recomputed.
        calls_1: int32 [1], how often it has selected inside a compiled graph.
        rows: of the pass.
        own_RK: integers [R, K], where to keep what it picks by itself.
        kept_RK: integers [R, K], what it picked by itself in the forward; -1 in the forward itself. Nobody writes to
            it: a graph may keep it for its backward.
        ids_RK: the routes to force, as `Rows.ids_LRK`, or None.
        weights_RK: the gate weights to force, as `Rows.weights_LRK`, or None.
        weights_into: float32 [R, K], where to keep gate weights; None where nobody wants to know.
        scores_into: where to keep its scores, without the axis of layers; likewise.
    """

    path: str
    layer: int
    again: bool
    calls_1: Tensor
    rows: Rows | None
    own_RK: Tensor
    kept_RK: Tensor
    ids_RK: Tensor | None
    weights_RK: Tensor | None
    weights_into: Tensor | None
    scores_into: Scores | None

    def choose(self, own_RK: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts to run, and those that the router picks by itself, int64 [R, K].

        Args:
            own_RK: integers, what the router selects by itself; None in a recomputation, which runs what was kept. In
                a graph, which is one for both, the router is always asked.

        Raises:
            ReplayError: when the router selects for other rows than the batch has.
        """
        own = self.kept_RK if own_RK is None else own_RK
        if torch.compiler.is_compiling():
            own = torch.where(self.kept_RK < 0, own, self.kept_RK)
        own = own.long()
        if own_RK is not None:
            self.keep(own)
        return self.forced(own), own

    def forced(self, own: Tensor, pick: int | None = None) -> Tensor:
        """int64, the ids to force, and the router's own where there is none.

        Args:
            own: int64 [R, K], or [R, 1] of one pick.
            pick: which, where it is one of several.

        Raises:
            ReplayError: as `choose`.
        """
        if self.ids_RK is None:
            return own
        ids = (self.ids_RK if pick is None else self.ids_RK[:, pick : pick + 1]).to(own.device)
        if ids.shape != own.shape:
            raise self._seeing_a_part(own)
        return torch.where(ids < 0, own, ids.long())

    def keep(self, own_RK: Tensor) -> None:
        """Keep what the router picks by itself, for the recomputation. Raises as `choose`."""
        if own_RK.shape != self.own_RK.shape:
            raise self._seeing_a_part(own_RK)
        if torch.compiler.is_compiling() or not self.again:
            self.own_RK.copy_(own_RK)

    def keep_scores(self, scores_RE: Tensor, own_RK: Tensor, *, by_probability: bool) -> None:
        """Keep what the router selected by, if anybody wants to know.

        Args:
            scores_RE: [R, E].
            own_RK: int64 [R, K], what it picks by itself.
            by_probability: whether the scores are probabilities, and no logits.
        """
        into = self.scores_into
        if into is None or (self.again and not torch.compiler.is_compiling()):
            return
        scores_RE = scores_RE.detach()
        picked_RK = scores_RE.gather(-1, own_RK)
        picks_all = own_RK.shape[-1] == scores_RE.shape[-1]
        into.picked.copy_(picked_RK)
        into.next.copy_(picked_RK.amin(-1) if picks_all else scores_RE.scatter(-1, own_RK, -torch.inf).amax(-1))
        if by_probability:
            into.by_probability.fill_(True)

    def gate_weights(self, own: Tensor) -> Tensor:
        """The gate weights of the executed experts, live or forced, kept if anybody wants to know.

        Whatever the model does with the weights afterwards, it does to forced ones as well: they are kept and put back
        at the same place. Forced weights are constants.

        Args:
            own: [..., K] for R rows, what the router made of live scores.
        """
        if self.weights_RK is not None:
            given = self.weights_RK.to(own.device, own.dtype).view(own.shape)
            own = torch.where(given.isnan(), own, given)
        if self.weights_into is not None and not self.again:
            self.weights_into.copy_(own.detach().reshape(self.weights_into.shape))
        return own

    def _seeing_a_part(self, own: Tensor) -> ReplayError:
        num_rows, top_k = self.own_RK.shape
        return ReplayError(
            f"router {self.path} selects {own.shape[1]} experts in {own.shape[0]} of the {num_rows} rows of the batch, "
            f"expected {top_k} in each; a router that sees only part of the batch cannot be recorded or replayed"
        )


@dataclass(frozen=True)
class Selection:
    """One selection as it was executed.

    Attributes:
        scores: [..., E], what was selected by; some routers keep batch and token axes apart.
        ids_RK: int64 [R, K], the experts that were selected, forced or not.
        own_RK: int64 [R, K], what the router picks by itself.
        by_probability: whether it selected by probabilities, and not by logits.
    """

    scores: Tensor
    ids_RK: Tensor
    own_RK: Tensor
    by_probability: bool = False

    @property
    def scores_RE(self) -> Tensor:
        """[R, E], the scores by row."""
        return _flat(self.scores)


class SelectionMode(TorchFunctionMode):
    """Watches one call of a router that selects by top-k. Other routers have a subclass in `selection_rules`.

    Args:
        final: which top-k of the call is the final selection, from 0; None where that is not known yet.
        now: what the router does in this pass; None to look on only.

    Attributes:
        asks: whether the router is to select by itself: not in a recomputation, unless in a graph, which is one for
            both.
        seen: every selection so far, in order.
        masked: where scores came from, if something was masked.
    """

    def __init__(self, final: int | None, now: LayerPass | None = None) -> None:
        super().__init__()
        self.final = final
        self.now = now
        self.asks = now is None or not now.again or torch.compiler.is_compiling()
        self.seen: list[Selection] = []
        self.masked: MaskedScores | None = None
        self._squashed = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs every torch function of the router: the final top-k in our way."""
        kwargs = kwargs or {}
        if func in TOP_K:
            return self._top_k(func, args, kwargs)
        self._squashed = self._squashed or func in SQUASHING
        if self.masked is None:
            if func not in MASKING:
                return func(*args, **kwargs)
            self.masked = MaskedScores()
        return self.masked.run(func, args, kwargs)

    def _top_k(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {name: kwargs[name] for name in kwargs if name != "input"}
        scores = args[0]
        now = self.now if len(self.seen) == self.final else None
        if now is None or now.ids_RK is None:
            result = func(*args, **kwargs)
            ids_RK = _flat(result.indices)
            self.seen.append(Selection(scores, ids_RK, ids_RK, self._squashed))
            if now is not None:
                now.keep(ids_RK)
            return result
        ids_RK, own_RK = now.choose(_flat(func(scores.detach(), *args[1:], **kwargs).indices) if self.asks else None)
        self.seen.append(Selection(scores, ids_RK, own_RK, self._squashed))
        ids = ids_RK.view(*scores.shape[:-1], ids_RK.shape[-1])
        live = scores if self.masked is None else self.masked.before_masking(scores)
        return torch.return_types.topk((live.gather(-1, ids), ids))


def _flat(tensor: Tensor) -> Tensor:
    """[..., E] as [R, E]."""
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


def with_gate_weights(output: Any, now: LayerPass, *, regroups: bool) -> Any:
    """What a router returned, with the weights to force in the slots that have a route.

    Args:
        output: what it returned.
        now: what it does in this pass.
        regroups: whether it hands its picks on in another order than that of tokens.

    Raises:
        ReplayError: when it does not hand on one for each pick.
    """
    is_tuple = isinstance(output, tuple | list)
    parts = list(output) if is_tuple else [output]
    found = [
        place
        for place, part in enumerate(parts)
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and part.numel() == now.own_RK.numel()
        and part.shape[-1] == now.own_RK.shape[-1]
    ]
    if len(found) != 1 or regroups:
        handed = f"hands on {len(found) or 'no'} tensors of one number per pick"
        raise ReplayError(
            f"router {now.path} {'regroups its picks' if regroups else handed}; expected one tensor of gate weights "
            "[tokens, K]. The gate weights of this family can be neither recorded nor replayed; leave gate_weights out"
        )
    own = parts[found[0]]
    parts[found[0]] = weights = now.gate_weights(own)
    if weights is own:
        return output
    if not is_tuple:
        return weights
    return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)


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
MASKING = FILLING | FILLING_IN_PLACE | CHOOSING | COMBINING | CONSTANT
"""What may mask scores, or begin a mask; nothing need be followed before the first of these."""


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
