"""Seeing and replacing the selection inside a router's own forward.

A router's forward runs unchanged; a `TorchFunctionMode` around it watches for its final top-k. What precedes
(projection, softmax, bias, group limits) and what follows (gathering, renormalising, scaling, casting) stays the
family's own code, so that no gate formula is written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .errors import ReplayError
from .recompute import run_unnumbered

if TYPE_CHECKING:
    from .passes import Rows

TOP_K = frozenset({torch.topk, Tensor.topk})
FILLING = frozenset({torch.masked_fill, Tensor.masked_fill})
SQUASHING = frozenset(
    {torch.softmax, Tensor.softmax, functional.softmax, torch.sigmoid, Tensor.sigmoid, functional.sigmoid}
)


class Scores(NamedTuple):
    """What routers selected by: a tensor each for all L of them, or for one without that axis."""

    picked: Tensor  # float32 [L, R, K], of their native picks, also where others are replayed
    next: Tensor  # float32 [L, R], the best of the others; of the last pick where all experts are picked
    by_probability: Tensor  # bool [L], whether they select by probabilities, and not by logits

    def margin(self) -> Tensor:
        """float32 [L, R], the K-th minus the (K+1)-th score, in a router's own scale; 0 where it picks all."""
        return self.picked.amin(-1) - self.next


@dataclass(frozen=True, eq=False)
class LayerPass:
    """What one router does in one pass."""

    path: str  # of the router, for messages
    layer: int  # its row of the layer axis
    is_recompute: bool
    calls_1: Tensor  # int32 [1], how often it has selected inside a compiled graph
    rows: Rows | None  # of the pass
    into_RK: Tensor  # integers [R, K], where to keep what it picks natively
    before_RK: Tensor  # what it picked in the forward; -1 in that itself. Never written: a graph may save it
    ids_RK: Tensor | None  # the routes to force, as `Rows.ids_LRK`
    scores_into: Scores | None  # where to keep its scores, without the axis of layers

    def choose(self, native_RK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Give the experts to run, and those that the router picks natively, int64 [R, K].

        `native_RK` are integers; None in a recomputation, which runs what was kept. In a graph, which is one for both,
        the router is always asked. Raises `ReplayError` when it selects for other rows than the batch has.
        """
        native = self.before_RK if native_RK is None else native_RK
        if torch.compiler.is_compiling():
            native = torch.where(self.before_RK < 0, native, self.before_RK)
        native = native.long()
        if native_RK is not None:
            self.keep(native)
        if self.ids_RK is None:
            return native, native
        ids = self.ids_RK.to(native.device)
        if ids.shape != native.shape:
            raise self._seeing_a_part(native)
        return torch.where(ids < 0, native, ids.long()), native

    def of_pick(self, pick: int) -> LayerPass:
        """Narrow it to one pick, for a router that makes them one after the other."""
        at = slice(pick, pick + 1)
        ids_R1 = None if self.ids_RK is None else self.ids_RK[:, at]
        return replace(self, into_RK=self.into_RK[:, at], before_RK=self.before_RK[:, at], ids_RK=ids_R1)

    def keep(self, native_RK: Tensor) -> None:
        """Keep what the router picks natively, for the recomputation. Raises as `choose`."""
        if native_RK.shape != self.into_RK.shape:
            raise self._seeing_a_part(native_RK)
        if torch.compiler.is_compiling() or not self.is_recompute:
            self.into_RK.copy_(native_RK)

    def keep_scores(self, scores_RE: Tensor, native_RK: Tensor, *, by_probability: bool) -> None:
        """Keep what the router selected by, if anybody wants to know. `native_RK` is int64."""
        into = self.scores_into
        if into is not None and (torch.compiler.is_compiling() or not self.is_recompute):
            run_unnumbered(_copy_scores, into, scores_RE, native_RK, by_probability)

    def _seeing_a_part(self, native: Tensor) -> ReplayError:
        num_rows, top_k = self.into_RK.shape
        return ReplayError(
            f"router {self.path} selects {native.shape[1]} experts in {native.shape[0]} of the {num_rows} rows of the "
            f"batch, expected {top_k} in each; a router that sees only part of the batch cannot be recorded or replayed"
        )


def _copy_scores(into: Scores, scores_RE: Tensor, native_RK: Tensor, by_probability: bool) -> None:
    scores_RE = scores_RE.detach()
    picked_RK = scores_RE.gather(-1, native_RK)
    picks_all = native_RK.shape[-1] == scores_RE.shape[-1]
    into.picked.copy_(picked_RK)
    into.next.copy_(picked_RK.amin(-1) if picks_all else scores_RE.scatter(-1, native_RK, -torch.inf).amax(-1))
    if by_probability:
        into.by_probability.fill_(True)


@dataclass(frozen=True)
class Selection:
    """One selection as it was executed."""

    scores: Tensor  # [..., E], what was selected by; some routers keep batch and token axes apart
    ids_RK: Tensor  # int64 [R, K], the experts that were selected, forced or not
    native_RK: Tensor  # int64 [R, K]
    by_probability: bool = False

    @property
    def scores_RE(self) -> Tensor:
        """[R, E], the scores by row."""
        return _flat(self.scores)


class SelectionMode(TorchFunctionMode):
    """Watches one call of a router that selects by top-k. Other routers have a subclass in `selection_rules`.

    A subclass hands its native picks to `now.keep`, or to `now.choose` and runs what that gives; calls them by
    `run_unnumbered`, and asks the router for picks only where `asks` is true; and leaves one final `Selection` in
    `seen`, with `by_probability` where it was made by probabilities.

    Routers that limit the selection to groups of experts overwrite the scores of the others, and some of them take gate
    weights from the overwritten tensor. An expert replayed from outside the live groups would get weight zero and no
    gradient; so the weights are gathered from the tensor before the mask. Every family masks with `masked_fill`. What
    masks in another way is refused when a model is attached: a replayed expert must not have weight zero.

    `final` says which top-k of the call is the final selection, None where that is not known yet; `now` is what the
    router does in this pass, None to look on only.
    """

    def __init__(self, final: int | None, now: LayerPass | None = None) -> None:
        super().__init__()
        self.final = final
        self.now = now
        in_graph = torch.compiler.is_compiling()
        # a recomputation runs what the forward picked; a graph is one for both, and always asks the router
        self.asks = now is None or not now.is_recompute or in_graph
        # asked once, as calls of Python count in each layer
        self._is_numbered = not in_graph and torch._C._len_torch_dispatch_stack() > 0
        self.seen: list[Selection] = []  # in order
        self._squashed = False
        # pairs (masked, what it was before); the tensors are held, so that identity stays meaningful
        self._masked: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a torch function of the router: its final top-k as the pass wants it, the others as they are."""
        kwargs = kwargs or {}
        if func in TOP_K:
            return self._top_k(func, args, kwargs)
        self._squashed = self._squashed or func in SQUASHING
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            func = torch.unflatten  # Dynamo cannot trace the method, which is written in Python, below a function mode
        result = func(*args, **kwargs)
        if func in FILLING:
            self._masked.append((result, self.before_masking(args[0])))
        return result

    def before_masking(self, scores: Tensor) -> Tensor:
        """Find the tensor that `scores` was masked from; `scores` itself where it was not."""
        for masked, before in self._masked:
            if masked is scores:
                return before
        return scores

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
                run_unnumbered(now.keep, ids_RK) if self._is_numbered else now.keep(ids_RK)
            return result
        given = now, func, scores.detach(), args[1:], kwargs
        ids_RK, native_RK = run_unnumbered(self._choose, *given) if self._is_numbered else self._choose(*given)
        self.seen.append(Selection(scores, ids_RK, native_RK, self._squashed))
        ids = ids_RK if scores.ndim == 2 else ids_RK.view(*scores.shape[:-1], ids_RK.shape[-1])
        live = self.before_masking(scores) if self._masked else scores
        return torch.return_types.topk((live.gather(-1, ids), ids))

    def _choose(
        self, now: LayerPass, func: Callable[..., Any], scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        return now.choose(_flat(func(scores, *args, **kwargs).indices) if self.asks else None)


def _flat(tensor: Tensor) -> Tensor:
    """[..., E] as [R, E]."""
    if tensor.ndim > 2:
        return tensor.flatten(0, -2)
    return tensor if tensor.ndim == 2 else tensor[None]


@dataclass(frozen=True)
class SelectionRule:
    """How one class of router selects.

    The self-check replays the expert behind each native pick, so that any K different experts must be a legal
    selection. A router that allows fewer is refused.
    """

    mode: type[SelectionMode] = SelectionMode  # what watches and forces its selection
    num_skip_classes: int = 0  # how many of its last ids stand for no expert at all
    is_lookup: bool = False  # whether it is a function of the token alone; it is checked and never forced
    read_back: Callable[[Any], Tensor] | None = None  # ids [R, K], ascending, from an output that has them otherwise
