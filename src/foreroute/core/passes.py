"""A pass: one forward of a stack of layers, and what each of its routers does in it, as tensors on its device.

Only the selection is replaced. A router computes scores, selects K experts, and turns the scores of the selected ones
into gate weights. Whatever its own rule is, it is evaluated at the forced experts, on live scores, with live gradients:

    g_i = exp(s_i) / sum_{j in I} exp(s_j)   for i in the replayed set I, else 0

for the softmax family (Rollout Routing Replay, arXiv 2510.11370, section 4.1).

Absence is data: an id of -1 stands for a row that has no route, and a gate weight of NaN for one that stays live. So
the host knows nothing of which rows these are, and nothing here waits for the device. What routers pick by themselves
is kept, and a recomputation runs the same experts as the forward in rows without a route too.

Letters: L routers in forward order, R rows of the batch as they see them, K picks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import ReplayError
from .overrides import SelectionHook


@dataclass(frozen=True)
class Rows:
    """Routes of a flattened batch, made once on the device and replayed as often as wanted.

    Attributes:
        ids_LRK: signed integers [L, R, K], the experts to run; -1 where the router chooses.
        weights_LRK: float32 [L, R, K], gate weights to force as constants; NaN where they stay live, None if all do.
    """

    ids_LRK: Tensor
    weights_LRK: Tensor | None = None


@dataclass(frozen=True)
class Watch:
    """What to keep of a pass, beside what routers picked by themselves.

    Attributes:
        scores: of their picks, and the best score that they left out.
        weights: the gate weights that they handed on. Not in a compiled graph.
        others: what other modules that select handed on. Not in a compiled graph.
        caches: whether key-value caches hold the same rows from forward to forward. Not in a compiled graph.
    """

    scores: bool = False
    weights: bool = False
    others: bool = False
    caches: bool = False

    @classmethod
    def of_any(cls, each: Sequence[Watch]) -> Watch:
        """What any of these keeps."""
        return cls(*map(any, zip(*(astuple(watch) for watch in each), strict=True))) if each else cls()


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
        self.keep(own)
        return own if self.ids_RK is None else forced(self.ids_RK, own), own

    def keep(self, own_RK: Tensor) -> None:
        """Keep what the router picks by itself, for the recomputation. Raises as `choose`."""
        if own_RK.shape != self.own_RK.shape:
            raise ReplayError(
                f"router {self.path} selects {own_RK.shape[1]} experts in {own_RK.shape[0]} of the "
                f"{self.own_RK.shape[0]} rows of the batch, expected {self.own_RK.shape[1]} in each; a router that "
                "sees only part of the batch cannot be recorded or replayed"
            )
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


def forced(ids: Tensor, own: Tensor) -> Tensor:
    """int64, the ids to force, and the router's own where there is none (-1). One shape."""
    if ids.shape != own.shape:
        raise ReplayError(
            f"the routes are for {ids.shape[0]} rows of {ids.shape[1]} picks, the router selects for {own.shape[0]} "
            f"of {own.shape[1]}; a router that sees only part of the batch cannot be replayed"
        )
    ids = ids.to(own.device)
    return torch.where(ids < 0, own, ids.long())


class Pass:
    """One forward over one batch.

    Args:
        routers: path and number of picks of each of the L routers.
        num_rows: R.
        id_dtype: of ids that are kept.
        device: of the batch.
        rows: the routes to force, or None.
        watch: what to keep.
        num_others: how many other modules select in it.

    Attributes:
        own_LRK: [L, R, K], what routers picked by themselves; -1 where they have not selected, or have fewer picks.
        scores: what they selected by; None where that is not watched.
        weights_LRK: float32 [L, R, K], the gate weights that they handed on; None where they are not watched.
        calls: how often each router, and each other module, has selected outside of compiled graphs.
        calls_L: int32, the same inside of them, on the device.
        others: for each other module, what it does in the pass, and in its recomputation.
        kept: what other modules handed on, by their number.
        with_grad: whether gradients were recorded when it began.
        last_layer: of the router that ran last, outside of compiled graphs; -1 before the first.
    """

    def __init__(
        self,
        routers: Sequence[tuple[str, int]],
        num_rows: int,
        id_dtype: torch.dtype,
        device: torch.device,
        rows: Rows | None,
        watch: Watch,
        num_others: int = 0,
    ) -> None:
        num_layers, top_k = len(routers), max(picks for _, picks in routers)
        self.rows = rows
        self.watch = watch
        self.own_LRK = torch.full((num_layers, num_rows, top_k), -1, dtype=id_dtype, device=device)
        self.weights_LRK = torch.empty(num_layers, num_rows, top_k, device=device) if watch.weights else None
        self.scores: Scores | None = None
        if watch.scores:
            picked = torch.empty(num_layers, num_rows, top_k, device=device)
            if any(picks < top_k for _, picks in routers):
                picked.fill_(torch.inf)  # behind the picks of a router, where none is the least
            self.scores = Scores(
                picked,
                torch.empty(num_layers, num_rows, device=device),
                torch.zeros(num_layers, dtype=torch.bool, device=device),
            )
        self.calls = [0] * (num_layers + num_others)
        self.calls_L = torch.zeros(num_layers + num_others, dtype=torch.int32, device=device)
        self.others: Sequence[tuple[Any, Any]] = ()
        self.kept: dict[int, Tensor] = {}
        self.with_grad = torch.is_grad_enabled()
        self.last_layer = -1
        self._routers = routers
        self._parts: dict[bool, list[Any]] = {}

    def parts(self, *, again: bool = False) -> list[Any]:
        """What each router does, and then each other module, now or in a recomputation."""
        if again not in self._parts:
            self._parts[again] = [*self._layers(again=again), *(each[again] for each in self.others)]
        return self._parts[again]

    @property
    def executed_LRK(self) -> Tensor:
        """[L, R, K], the experts that ran."""
        if self.rows is None:
            return self.own_LRK
        return torch.where(self.rows.ids_LRK < 0, self.own_LRK, self.rows.ids_LRK)

    def _layers(self, *, again: bool) -> list[LayerPass]:
        rows, scores = self.rows, self.scores
        nothing = torch.full_like(self.own_LRK[0], -1)  # for the forward to find, and for a recomputation to write to
        into, kept = (nothing, self.own_LRK) if again else (self.own_LRK, nothing)
        given = (None, None) if rows is None else (rows.ids_LRK, rows.weights_LRK)
        picks = [self._by_layer(each) for each in (into, kept, *given, self.weights_LRK)]
        calls, layers = self.calls_L.split(1), []
        for layer, (path, top_k) in enumerate(self._routers):
            own, before, ids, weights, weights_into = (None if each is None else each[layer] for each in picks)
            if top_k < nothing.shape[-1]:
                cut = (own, before, ids, weights, weights_into)
                own, before, ids, weights, weights_into = (None if each is None else each[:, :top_k] for each in cut)
            assert own is not None, "a part of every pass"
            assert before is not None, "a part of every pass"
            scores_into = None
            if scores is not None:
                scores_into = Scores(scores.picked[layer][:, :top_k], scores.next[layer], scores.by_probability[layer])
            layers.append(
                LayerPass(path, layer, again, calls[layer], rows, own, before, ids, weights, weights_into, scores_into)
            )
        return layers

    def _by_layer(self, tensor: Tensor | None) -> Sequence[Tensor] | None:
        """[R, K] of each layer, of a tensor for all of them, or of one that they share."""
        if tensor is None or tensor.ndim == 3:
            return tensor if tensor is None else tensor.unbind()
        return [tensor] * len(self._routers)


class ForwardArgs(Protocol):
    """What the arguments of one forward say about its batch. Every framework has its own."""

    @property
    def num_slots(self) -> int:
        """R, rows of the batch that routers see, padding included."""

    @property
    def device(self) -> torch.device:
        """Where the model takes them."""


class Listener:
    """What a session wants to know and to decide. The default does nothing.

    Attributes:
        watch: what its passes keep.
        forces: whether `begin` gives routes.
        counts_executed: whether losses after the routers are to count the executed selection.
    """

    watch = Watch()
    forces = False
    counts_executed = False

    def begin(self, chunk: int, args: Any) -> Rows | None:
        """A pass of a chunk begins. Returns the routes to force on it, or None."""
        return None

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """The pass is over, and every router of the chunk selected once in it; None of a chunk without routers."""


class RouterHook(SelectionHook):
    """A router, whose `select` hands what it does to a `LayerPass`.

    Args:
        path: dotted name inside the chunk.
        selecting: the module and the name of its method in which the selection is made.
        num_experts: E.
        top_k: its number of picks.
    """

    noun = "router"
    now: LayerPass | None

    def __init__(self, path: str, selecting: tuple[nn.Module, str], num_experts: int, top_k: int) -> None:
        super().__init__(path, selecting)
        self.num_experts = num_experts
        self.top_k = top_k


def is_in(ids_LRK: Tensor, others_LRK: Tensor) -> Tensor:
    """Bool [L, R, K], which ids are among the other K of their row. Takes memory of the size of its result only."""
    found = ids_LRK == others_LRK[..., :1]
    for k in range(1, others_LRK.shape[-1]):
        found |= ids_LRK == others_LRK[..., k : k + 1]
    return found


def signed_dtype(num_experts: int) -> torch.dtype:
    """The narrowest type of ids on the device, in which -1 is none."""
    return next(t for t in (torch.int8, torch.int16, torch.int32) if num_experts <= torch.iinfo(t).max + 1)
