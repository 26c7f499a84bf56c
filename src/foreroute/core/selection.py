"""Seeing and replacing the selection inside a router's own forward.

A router's forward runs unchanged; a `TorchFunctionMode` around it watches for its final top-k. What precedes
(projection, softmax, bias, group limits) and what follows (gathering, renormalising, scaling, casting) stays the
family's own code, so that no gate formula is written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import ReplayError
from .recompute import run_unnumbered

if TYPE_CHECKING:
    from .passes import Rows

TOP_K = frozenset({torch.topk, Tensor.topk})
FILLING = frozenset({torch.masked_fill, Tensor.masked_fill})


@dataclass(frozen=True, eq=False)
class LayerPass:
    """Pass of one router."""

    path: str  # of the router, for messages
    layer: int  # its row of the layer axis
    is_recompute: bool
    asks: bool  # whether the router picks for itself as well; inside a graph it always does
    calls_1: Tensor  # int32 [1], how often it has selected inside a compiled graph
    rows: Rows | None  # of the pass
    into_RK: Tensor  # integers [R, K], where to keep what it picks natively
    before_RK: Tensor  # what it picked in the forward; -1 in that itself. Never written: a graph may save it
    ids_RK: Tensor | None  # int64 [R, K], the routes to force; None without replay
    absent_R1: Tensor | None  # bool [R, 1], rows that have none
    margin_into: Tensor | None = None  # float32 [R], where to keep `Pass.margin_LR`
    deficit_into: Tensor | None = None  # the same of `Pass.deficit_LR`
    by_softmax: bool = False  # whether it selects by a softmax, whose logarithms are its logits but for a constant

    def choose(self, native_RK: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give the experts to run, and those that the router picks natively, int64 [R, K] on its device.

        `native_RK` are integers; None where the router was not asked: what was kept stands for them in a recomputation,
        and nothing needs them where every row is forced. In a graph, which is one for forward and recomputation, it is
        always asked. Raises `ReplayError` when it selects for other rows than the batch has.
        """
        in_graph = torch.compiler.is_compiling()
        ids = None if self.ids_RK is None else self.ids_RK.to(device)
        if ids is not None and native_RK is None and not self.is_recompute:
            return ids, ids
        native = self.before_RK.to(device) if native_RK is None else native_RK
        if in_graph:
            native = torch.where(self.before_RK < 0, native, self.before_RK)
        native = native.long()
        if native_RK is not None:
            self.keep(native)
        if ids is None or self.rows is None or self.absent_R1 is None:
            return native, native
        if ids.shape != native.shape:
            raise self._seeing_a_part(*native.shape)
        if not in_graph and self.rows.is_complete:
            return ids, native
        return torch.where(self.absent_R1.to(device), native, ids), native

    def of_picks(self, at: slice) -> LayerPass:
        """Narrow it to these picks, for a router that has fewer, or makes them one after the other."""
        ids_RK = None if self.ids_RK is None else self.ids_RK[:, at]
        return replace(self, into_RK=self.into_RK[:, at], before_RK=self.before_RK[:, at], ids_RK=ids_RK)

    def keep(self, native_RK: Tensor) -> None:
        """Keep what the router picks natively, for the recomputation. Raises as `choose`."""
        if native_RK.shape != self.into_RK.shape:
            raise self._seeing_a_part(*native_RK.shape)
        if torch.compiler.is_compiling() or not self.is_recompute:
            self.into_RK.copy_(native_RK)

    def keep_distances(self, selection: Selection) -> None:
        """Keep how far the picks are from others, if anybody wants to know."""
        if self.is_recompute and not torch.compiler.is_compiling():
            return
        if self.margin_into is not None:
            run_unnumbered(_copy_margin, self.margin_into, selection)
        if self.deficit_into is not None:
            run_unnumbered(_copy_deficit, self.deficit_into, selection, self.by_softmax)

    def require_rows(self, scores: Tensor) -> None:
        """Raise `ReplayError` where a router that is not asked has scores [..., E] of other rows than the batch has."""
        if scores.shape[:-1].numel() != len(self.into_RK):
            raise self._seeing_a_part(scores.shape[:-1].numel(), self.into_RK.shape[1])

    def _seeing_a_part(self, rows: int, picks: int) -> ReplayError:
        num_rows, top_k = self.into_RK.shape
        return ReplayError(
            f"router {self.path} selects {picks} experts in {rows} of the {num_rows} rows of the batch, expected "
            f"{top_k} in each; a router that sees only part of the batch cannot be recorded or replayed"
        )


def _copy_margin(into: Tensor, selection: Selection) -> None:
    scores_RE, native_RK = selection.scores_RE.detach(), selection.native_RK
    if native_RK.shape[-1] == scores_RE.shape[-1]:
        into.zero_()
        return
    others = scores_RE.scatter(-1, native_RK, -torch.inf).amax(-1)
    into.copy_(selection.picked_RK.amin(-1).float() - others.float())


def _copy_deficit(into: Tensor, selection: Selection, by_softmax: bool) -> None:
    # nothing of this is kept for a backward, as a recomputation does not do it again
    scores_RE = selection.scores_RE.detach()
    last = selection.picked_RK.amin(-1).float()
    forced_RK = scores_RE.gather(-1, selection.ids_RK)
    least = forced_RK.amin(-1).float()
    if by_softmax:
        smallest = torch.finfo(torch.float32).tiny
        last, least = (each.clamp_min(smallest).log() for each in (last, least))
    deficit = last - least
    if selection.live is not None:
        # of another group of experts: how near the groups were is not how near these experts are
        is_out_R = (forced_RK != _flat(selection.live).detach().gather(-1, selection.ids_RK)).any(-1)
        deficit = deficit.masked_fill(is_out_R, torch.nan)
    into.copy_(deficit)


@dataclass(frozen=True)
class Selection:
    """One selection as it was executed."""

    scores: Tensor  # [..., E], what was selected by; some routers keep batch and token axes apart
    ids_RK: Tensor  # int64 [R, K], the experts that were selected, forced or not
    native_RK: Tensor  # int64 [R, K]
    picked: Tensor | None = None  # [..., K], scores of the native picks, where the selection gave them
    live: Tensor | None = None  # [..., E], the scores before experts of other groups were masked, where they were

    @property
    def scores_RE(self) -> Tensor:
        """[R, E], the scores by row."""
        return _flat(self.scores)

    @property
    def picked_RK(self) -> Tensor:
        """[R, K], the scores of the native picks, without gradient."""
        picked = self.scores_RE.gather(-1, self.native_RK) if self.picked is None else _flat(self.picked)
        return picked.detach()


class SelectionMode(TorchFunctionMode):
    """Watches one call of a router that selects by top-k. Other routers have a subclass in `selection_rules`.

    A subclass hands its native picks to `now.keep`, or to `now.choose` and runs what that gives; calls them by
    `run_unnumbered`, and asks the router for picks only where `asks` is true; and leaves one final `Selection` in
    `seen`.

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
        # a graph is one for all passes, and always asks the router
        self.asks = now is None or now.asks or in_graph
        # asked once, as calls of Python count in each layer
        self._is_numbered = not in_graph and torch._C._len_torch_dispatch_stack() > 0
        self.seen: list[Selection] = []  # in order
        # pairs (masked, what it was before); the tensors are held, so that identity stays meaningful
        self._masked: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a torch function of the router: its final top-k as the pass wants it, the others as they are."""
        kwargs = kwargs or {}
        if func in TOP_K:
            return self._top_k(func, args, kwargs)
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
            # without its scores, which the router goes on with, and some overwrite
            live = self.before_masking(scores) if self._masked else None
            self.seen.append(Selection(scores, ids_RK, ids_RK, live=live))
            if now is not None:
                run_unnumbered(now.keep, ids_RK) if self._is_numbered else now.keep(ids_RK)
            return result
        # its own picks are no part of what gradients flow through
        alone = scores.detach() if self.asks and scores.requires_grad else scores
        given = now, func, alone, args[1:], kwargs
        chosen = run_unnumbered(self._choose, *given) if self._is_numbered else self._choose(*given)
        ids_RK, native_RK, picked = chosen
        live = self.before_masking(scores) if self._masked else None
        self.seen.append(Selection(scores, ids_RK, native_RK, picked, live))
        ids = ids_RK if scores.ndim == 2 else ids_RK.view(*scores.shape[:-1], ids_RK.shape[-1])
        return torch.return_types.topk(((scores if live is None else live).gather(-1, ids), ids))

    def _choose(
        self, now: LayerPass, func: Callable[..., Any], scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not self.asks:
            now.require_rows(scores)
            return *now.choose(None, scores.device), None
        native = func(scores, *args, **kwargs)
        return *now.choose(_flat(native.indices), scores.device), native.values


def _flat(tensor: Tensor) -> Tensor:
    """[..., E] as [R, E]."""
    if tensor.ndim > 2:
        return tensor.flatten(0, -2)
    return tensor if tensor.ndim == 2 else tensor[None]


@dataclass(frozen=True)
class SelectionRule:
    """Rule by which one class of router selects.

    The self-check replays the expert behind each native pick, so that any K different experts must be a legal
    selection. A router that allows fewer is refused.
    """

    mode: type[SelectionMode] = SelectionMode  # what watches and forces its selection
    num_skip_classes: int = 0  # how many of its last ids stand for no expert at all
    is_block: bool = False  # whether it is a block around a gate, which may run the experts too
    is_lookup: bool = False  # whether it is a function of the token alone; it is checked and never forced
    read_back: Callable[[Any], Tensor] | None = None  # ids [R, K], ascending, from an output that has them otherwise
