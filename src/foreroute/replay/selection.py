"""The selection of one router in one pass: forced to given experts or left to the router, and observed.

Only the selection is replaced. A router computes scores, selects K experts, and turns the scores of the selected ones
into gate weights; whatever its own rule is (softmax before or after selection, sigmoid with a bias that only steers
selection, renormalisation, scaling), it is evaluated at the forced experts, on live scores, with live gradients:

    g_i = exp(s_i) / sum_{j in I} exp(s_j)   for i in the replayed set I, else 0

for the softmax family (Rollout Routing Replay, arXiv 2510.11370, section 4.1). The scores are gathered from the dense
scores, never from scores that were already zeroed outside the router's own choice: an expert that the live router would
not have picked keeps its weight and its gradient.

What routers do is observed in buffers on the device, which each router writes while it selects. They were made before
the pass, and routers do nothing else, so that a compiled or checkpointed layer can do it as well as a plain one, and so
that it costs them little. What was observed is worked out for all layers at once when the pass is over, and nothing is
copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreroute.errors import ReplayError
from foreroute.replay.rows import Policy, ReplayRows
from foreroute.trace import RoutingSpec


class Forced(NamedTuple):
    """What the router's top-k returns in replay.

    Attributes:
        values_RK: [R, K], dense scores at the ids, differentiable.
        ids_RK: int64 [R, K], the experts that are executed.
        own_ids_RK: int64 [R, K], what the router picks by itself; None if it was not asked about every slot.
    """

    values_RK: Tensor
    ids_RK: Tensor
    own_ids_RK: Tensor | None


def forced_selection(
    choice_scores_RE: Tensor,
    dense_scores_RE: Tensor,
    rows: ReplayRows,
    own_choice: Callable[[Tensor], Tensor],
    *,
    ask_all: bool = False,
) -> Forced:
    """What the router's own top-k would have returned had it picked the replayed experts.

    Slots without a route keep the router's own choice. Unless `ask_all`, or compiled into a graph, it is asked about
    no other slot.

    Args:
        choice_scores_RE: [R, E], what the router selects by; masked entries allowed.
        dense_scores_RE: [R, E], the same scores before any masking; the gate weights come from here.
        rows: the experts to select, of this router alone.
        own_choice: the router's selection, scores [Q, E] -> int64 ids [Q, K].
        ask_all: whether the router is to select by itself in every slot, beside what is forced on it.

    Raises:
        ReplayError: when the router saw another number of rows than the batch has slots.
    """
    ids_RK = rows.ids_LRK[0]
    if choice_scores_RE.shape[:-1] != ids_RK.shape[:-1]:
        raise ReplayError(
            f"the router selects for rows of shape {tuple(choice_scores_RE.shape[:-1])}, the replayed batch has "
            f"{tuple(ids_RK.shape[:-1])}; a router that sees only part of the batch cannot be replayed"
        )
    device = choice_scores_RE.device
    ids = ids_RK.to(device=device, dtype=torch.int64)
    own = None
    # which slots lack a route is data: a graph asks about all of them, so as to hold for any batch
    if ask_all or torch.compiler.is_compiling():
        own = own_choice(choice_scores_RE.detach())
        ids = torch.where(rows.routed_R.to(device)[:, None], ids, own)
    elif rows.unrouted_Q is not None:
        unrouted_Q = rows.unrouted_Q.to(device)
        ids = ids.index_copy(0, unrouted_Q, own_choice(choice_scores_RE.detach()[unrouted_Q]))
    return Forced(dense_scores_RE.gather(-1, ids), ids, own)


@dataclass(frozen=True)
class LayerPass:
    """What one router does in one pass.

    Attributes:
        layer: its position on the layer axis of the pass.
        rows: the routes to force, those of this router alone, or None where it chooses itself.
        observed: where it writes down what it did, or None where nobody wants to know.
        calls_1: int32 [1], how often it has selected inside a compiled graph.
        num_slots: R, rows of the batch that routers see, padding included.
        top_k: K.
        ask_all: whether it is to select by itself in every slot, beside what is forced on it.
    """

    layer: int
    rows: ReplayRows | None
    observed: LayerObservation | None
    calls_1: Tensor
    num_slots: int
    top_k: int
    ask_all: bool = False

    def force(
        self,
        choice_scores_RE: Tensor,
        dense_scores_RE: Tensor,
        own_choice: Callable[[Tensor], Tensor],
        *,
        ask_all: bool = False,
    ) -> Forced:
        """`forced_selection` on the rows of this pass. Raises as that does."""
        assert self.rows is not None, "a router is forced where there are routes"
        asked = ask_all or self.ask_all
        return forced_selection(choice_scores_RE, dense_scores_RE, self.rows, own_choice, ask_all=asked)

    def observe(
        self, scores_RE: Tensor, ids_RK: Tensor, own_ids_RK: Tensor | None, *, path: str, by_probability: bool
    ) -> None:
        """Write down one selection, if anybody wants to know. Arguments as in `LayerObservation.write`.

        Raises:
            ReplayError: when the router saw another number of rows than the batch has slots.
        """
        if ids_RK.shape[0] != self.num_slots:
            raise ReplayError(
                f"router {path} saw {ids_RK.shape[0]} of the {self.num_slots} positions of the batch; "
                "a router that sees only the text of it cannot be recorded or replayed"
            )
        if self.observed is not None:
            own = ids_RK if own_ids_RK is None else own_ids_RK
            self.observed.write(scores_RE.detach(), ids_RK, own, by_probability=by_probability)

    def with_gate_weights(self, own: Tensor) -> Tensor:
        """The gate weights of the executed experts, live or forced, observed if anybody wants to know.

        Whatever the model does with the weights afterwards, it does to forced ones as well: they are observed and put
        back at the same place. In slots that have a route, forced weights are constants.

        Args:
            own: [..., K] for R slots, what the router made of live scores.
        """
        if self.rows is not None and self.rows.weights_LRK is not None:
            forced = self.rows.weights_LRK[0].to(own.device, own.dtype).view(own.shape)
            routed_R = self.rows.routed_R & self.rows.real_R  # padding that replay picks for has no weights
            routed = routed_R.to(own.device).view(*own.shape[:-1], 1)
            own = torch.where(routed, forced, own)
        if self.observed is not None and self.observed.weights_RK is not None:
            self.observed.weights_RK.copy_(own.detach().reshape(self.observed.weights_RK.shape))
        return own

    @property
    def handles_gate_weights(self) -> bool:
        """Whether gate weights are observed or forced in this pass."""
        observes = self.observed is not None and self.observed.weights_RK is not None
        return observes or (self.rows is not None and self.rows.weights_LRK is not None)


@dataclass(frozen=True)
class Watch:
    """What to observe.

    Attributes:
        ids: the executed experts.
        own: what the router picks by itself, its scores, and the best score that it leaves out.
        weights: the gate weights that the router hands on. Not in a compiled graph.
        indexers: what the indexers hand on. Not in a compiled graph.
    """

    ids: bool = False
    own: bool = False
    weights: bool = False
    indexers: bool = False

    @classmethod
    def under(cls, policy: Policy) -> Watch:
        """What a replay under this policy observes."""
        return cls(ids=policy.counts == "replayed", own=policy.telemetry)

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to observe of routers."""
        return not (self.ids or self.own or self.weights)


@dataclass(frozen=True)
class PassObservation:
    """What all routers of a model, or of its chunk, did in one pass; None for what is not watched.

    Attributes:
        ids_LRK: uint8 or uint16 [L, R, K], executed.
        own_ids_LRK: uint8 or uint16 [L, R, K], what they would pick by themselves.
        own_values_LRK: float32 [L, R, K], their selection scores of these.
        next_LR: float32 [L, R], the best selection score of the others; of the last pick where all experts are picked.
        by_probability_L: bool [L], whether they select by probabilities, and not by logits.
        weights_LRK: float32 [L, R, K], the gate weights of what is executed.
        choices: what each indexer handed on, by its number; in eager mode, and no part of `tensors`.
    """

    ids_LRK: Tensor | None
    own_ids_LRK: Tensor | None
    own_values_LRK: Tensor | None
    next_LR: Tensor | None
    by_probability_L: Tensor | None
    weights_LRK: Tensor | None = None
    choices: dict[int, Tensor] = field(default_factory=dict, kw_only=True)

    @classmethod
    def empty(cls, watch: Watch, num_slots: int, spec: RoutingSpec, device: torch.device) -> PassObservation:
        """Room for `num_slots` rows of what is watched."""
        rows, picks = (spec.num_layers, num_slots), (spec.num_layers, num_slots, spec.top_k)
        return cls(
            torch.empty(picks, dtype=id_dtype(spec), device=device) if watch.ids else None,
            torch.empty(picks, dtype=id_dtype(spec), device=device) if watch.own else None,
            torch.empty(picks, dtype=torch.float32, device=device) if watch.own else None,
            torch.empty(rows, dtype=torch.float32, device=device) if watch.own else None,
            torch.zeros(spec.num_layers, dtype=torch.bool, device=device) if watch.own else None,
            torch.empty(picks, dtype=torch.float32, device=device) if watch.weights else None,
        )

    @classmethod
    def from_tensors(cls, watch: Watch, tensors: list[Tensor]) -> PassObservation:
        """The way back from `tensors`."""
        left = iter(tensors)
        watched = (watch.ids, *(watch.own,) * 4, watch.weights)
        return cls(*(next(left) if each else None for each in watched))

    def tensors(self) -> list[Tensor]:
        """Those that are watched, in the order of the attributes."""
        return [tensor for tensor in self._every() if tensor is not None]

    def by_layer(self, num_layers: int) -> list[LayerObservation]:
        """The parts that routers write, one for each."""
        every = [[None] * num_layers if each is None else each.unbind() for each in self._every()]
        return [LayerObservation(*parts) for parts in zip(*every, strict=True)]

    def own(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What routers pick by themselves, who watched for it: ids, scores, margin and `by_probability_L`.

        The margin, float32 [L, R], is the K-th minus the (K+1)-th selection score, in a router's own scale; 0 where it
        picks all.
        """
        ids, values, left_out, by_probability = (
            self.own_ids_LRK,
            self.own_values_LRK,
            self.next_LR,
            self.by_probability_L,
        )
        if ids is None or values is None or left_out is None or by_probability is None:
            raise AssertionError("who reads what routers pick by themselves has watched for it")
        return ids, values, values.amin(-1) - left_out, by_probability

    def _every(self) -> tuple[Tensor | None, ...]:
        scored = (self.own_values_LRK, self.next_LR, self.by_probability_L)
        return (self.ids_LRK, self.own_ids_LRK, *scored, self.weights_LRK)


@dataclass(frozen=True)
class LayerObservation:
    """The part of a `PassObservation` that one router writes: attributes as there, of one layer."""

    ids_RK: Tensor | None
    own_ids_RK: Tensor | None
    own_values_RK: Tensor | None
    next_R: Tensor | None
    by_probability: Tensor | None
    weights_RK: Tensor | None = None

    def write(self, scores_RE: Tensor, ids_RK: Tensor, own_ids_RK: Tensor, *, by_probability: bool) -> None:
        """Write down one selection.

        Args:
            scores_RE: [R, E], selected by, without gradient.
            ids_RK: int64 [R, K], executed.
            own_ids_RK: int64 [R, K], what the router picks by itself; as executed where nothing is forced.
            by_probability: whether the scores are probabilities, and no logits.
        """
        _copy(ids_RK, self.ids_RK)
        if self.own_ids_RK is None:
            return
        values_RK = scores_RE.gather(-1, own_ids_RK)
        picks_all = own_ids_RK.shape[-1] == scores_RE.shape[-1]
        left_out = values_RK.amin(-1) if picks_all else scores_RE.scatter(-1, own_ids_RK, -torch.inf).amax(-1)
        _copy(own_ids_RK, self.own_ids_RK)
        _copy(values_RK, self.own_values_RK)
        _copy(left_out, self.next_R)
        if by_probability and self.by_probability is not None:
            self.by_probability.fill_(True)


def id_dtype(spec: RoutingSpec) -> torch.dtype:
    """The width of ids in a trace of this model, as a torch type."""
    return torch.uint8 if spec.id_dtype == np.uint8 else torch.uint16


def _copy(value: Tensor, into: Tensor | None) -> None:
    if into is not None:
        into.copy_(value)
