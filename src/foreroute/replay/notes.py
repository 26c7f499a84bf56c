"""What is noted down about one pass while its routers run: buffers on the device, one set per router.

Routers write into tensors that were made before the pass and do nothing else, so that a compiled or checkpointed layer
can do it as well as a plain one, and so that it costs them little. What the notes mean is worked out for all layers at
once when the pass is over, and nothing is copied to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from foreroute.trace import RoutingSpec

Counts = Literal["native", "replayed"]
"""Whose selection counts: the router's own one, or the executed one (replayed, and its own where no route is)."""


@dataclass(frozen=True)
class Watch:
    """What to note.

    Attributes:
        ids: the executed experts.
        own: what the router picks by itself, its scores, and the best score that it leaves out.
        weights: the gate weights that the router hands on. Not in a compiled graph.
    """

    ids: bool = False
    own: bool = False
    weights: bool = False

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to note."""
        return not (self.ids or self.own or self.weights)

    def __or__(self, other: Watch) -> Watch:
        """What either wants."""
        return Watch(self.ids or other.ids, self.own or other.own, self.weights or other.weights)


@dataclass(frozen=True)
class LayerNotes:
    """Room for the notes of one router in one pass; None for what is not watched.

    Attributes:
        ids_RK: uint8 or uint16 [R, K], executed.
        own_ids_RK: uint8 or uint16 [R, K], what it would pick by itself.
        own_values_RK: float32 [R, K], its selection scores of these.
        next_R: float32 [R], the best selection score of the others; of its last pick where it picks all.
        by_probability_1: bool [1], whether it selects by probabilities, and not by logits.
        weights_RK: float32 [R, K], the gate weights of what is executed.
    """

    ids_RK: Tensor | None
    own_ids_RK: Tensor | None
    own_values_RK: Tensor | None
    next_R: Tensor | None
    by_probability_1: Tensor | None
    weights_RK: Tensor | None = None

    def write(self, scores_RE: Tensor, ids_RK: Tensor, own_ids_RK: Tensor, *, by_probability: bool) -> None:
        """Note one selection.

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
        if by_probability and self.by_probability_1 is not None:
            self.by_probability_1.fill_(True)


@dataclass(frozen=True)
class PassNotes:
    """The notes of all routers in one pass, attributes as in `LayerNotes`."""

    ids_LRK: Tensor | None
    own_ids_LRK: Tensor | None
    own_values_LRK: Tensor | None
    next_LR: Tensor | None
    by_probability_L: Tensor | None
    weights_LRK: Tensor | None = None

    @classmethod
    def empty(cls, watch: Watch, num_slots: int, spec: RoutingSpec, device: torch.device) -> PassNotes:
        """Room for `num_slots` rows."""
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
    def from_tensors(cls, watch: Watch, tensors: list[Tensor]) -> PassNotes:
        """The way back from `tensors`. Gate weights are not among them."""
        left = iter(tensors)
        ids = next(left) if watch.ids else None
        return cls(ids, *((next(left) for _ in range(4)) if watch.own else (None,) * 4))

    def tensors(self) -> list[Tensor]:
        """Those that are watched in a compiled graph, in the order of the attributes."""
        every = (self.ids_LRK, self.own_ids_LRK, self.own_values_LRK, self.next_LR, self.by_probability_L)
        return [tensor for tensor in every if tensor is not None]

    def layer(self, layer: int) -> LayerNotes:
        """The part that one router writes."""
        return LayerNotes(
            None if self.ids_LRK is None else self.ids_LRK[layer],
            None if self.own_ids_LRK is None else self.own_ids_LRK[layer],
            None if self.own_values_LRK is None else self.own_values_LRK[layer],
            None if self.next_LR is None else self.next_LR[layer],
            None if self.by_probability_L is None else self.by_probability_L[layer : layer + 1],
            None if self.weights_LRK is None else self.weights_LRK[layer],
        )

    @property
    def margin_LR(self) -> Tensor:
        """float32 [L, R], K-th minus (K+1)-th selection score, in a router's own scale; 0 where it picks all."""
        return required(self.own_values_LRK).amin(-1) - required(self.next_LR)


def required(noted: Tensor | None) -> Tensor:
    """A note that its reader asked for when the pass began."""
    assert noted is not None, "who reads a note has watched for it"
    return noted


def id_dtype(spec: RoutingSpec) -> torch.dtype:
    """The width of ids in a trace of this model, as a torch type."""
    return torch.uint8 if spec.id_dtype == np.uint8 else torch.uint16


def _copy(value: Tensor, into: Tensor | None) -> None:
    if into is not None:
        into.copy_(value)
