"""What is noted down about one pass while its routers run: buffers on the device, one set per router.

Routers write into tensors that were made before the pass and do nothing else, so that a compiled or checkpointed layer
can do it as well as a plain one. Nobody reads them before the pass is over, and nothing is copied to the host.
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
        margins: the gap between the K-th and the (K+1)-th selection score.
        comparison: the router's own selection beside the executed one.
        counts: the tokens of each expert, of this selection.
    """

    ids: bool = False
    margins: bool = False
    comparison: bool = False
    counts: Counts | None = None

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to note."""
        return not (self.ids or self.margins or self.comparison or self.counts)

    @property
    def needs_own(self) -> bool:
        """Whether the router must select by itself even where a route is forced."""
        return self.margins or self.comparison or self.counts == "native"

    def __or__(self, other: Watch) -> Watch:
        """What either wants. Two that count must count the same; sessions see to it that only one does."""
        return Watch(
            self.ids or other.ids,
            self.margins or other.margins,
            self.comparison or other.comparison,
            self.counts or other.counts,
        )


@dataclass(frozen=True)
class LayerNotes:
    """Room for the notes of one router in one pass; None for what is not watched.

    Attributes:
        ids_RK: uint8 or uint16 [R, K], executed.
        margin_R: float32 [R], in the router's own scale.
        shared_R: uint8 [R], experts picked by both.
        replaced_R: float32 [R], share of the router's own selection mass that lay on experts replaced by others.
        counts_E: int64 [E], tokens per expert, padding left out.
    """

    ids_RK: Tensor | None
    margin_R: Tensor | None
    shared_R: Tensor | None
    replaced_R: Tensor | None
    counts_E: Tensor | None
    counts: Counts | None

    @classmethod
    def empty(cls, watch: Watch, num_slots: int, spec: RoutingSpec, device: torch.device) -> LayerNotes:
        """Room for `num_slots` rows."""

        def room(wanted: bool, dtype: torch.dtype, *shape: int) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=device) if wanted else None

        return cls(
            room(watch.ids, id_dtype(spec), num_slots, spec.top_k),
            room(watch.margins or watch.comparison, torch.float32, num_slots),
            room(watch.comparison, torch.uint8, num_slots),
            room(watch.comparison, torch.float32, num_slots),
            room(watch.counts is not None, torch.int64, spec.num_experts),
            watch.counts,
        )

    @classmethod
    def from_tensors(cls, watch: Watch, tensors: list[Tensor]) -> LayerNotes:
        """The way back from `tensors`; takes its own off the front of the list."""

        def next_if(wanted: bool) -> Tensor | None:
            return tensors.pop(0) if wanted else None

        return cls(
            next_if(watch.ids),
            next_if(watch.margins or watch.comparison),
            next_if(watch.comparison),
            next_if(watch.comparison),
            next_if(watch.counts is not None),
            watch.counts,
        )

    def tensors(self) -> list[Tensor]:
        """Those that are watched, in the order of the attributes."""
        every = (self.ids_RK, self.margin_R, self.shared_R, self.replaced_R, self.counts_E)
        return [tensor for tensor in every if tensor is not None]

    def write(
        self, scores_RE: Tensor, ids_RK: Tensor, own_ids_RK: Tensor, real_R: Tensor, *, by_probability: bool
    ) -> None:
        """Note one selection.

        Args:
            scores_RE: [R, E], selected by, without gradient.
            ids_RK: int64 [R, K], executed.
            own_ids_RK: int64 [R, K], what the router picks by itself; as executed where nothing is forced.
            real_R: bool [R], False for padding.
            by_probability: whether the scores are probabilities, and no logits.
        """
        if self.ids_RK is not None:
            self.ids_RK.copy_(ids_RK)
        if self.margin_R is not None:
            own_values_RK = scores_RE.gather(-1, own_ids_RK)
            self.margin_R.copy_(boundary_margin(scores_RE, own_ids_RK, own_values_RK))
            if self.shared_R is not None and self.replaced_R is not None:
                kept_RK = (own_ids_RK[:, :, None] == ids_RK[:, None, :]).any(-1)
                mass_RK = selection_mass(own_values_RK.float(), by_probability=by_probability)
                self.shared_R.copy_(kept_RK.sum(-1))
                self.replaced_R.copy_((mass_RK * ~kept_RK).sum(-1))
        if self.counts_E is not None:
            counted_RK = own_ids_RK if self.counts == "native" else ids_RK
            ones_RK = real_R.to(counted_RK.device, torch.int64)[:, None].expand_as(counted_RK)
            self.counts_E.scatter_add_(0, counted_RK.reshape(-1), ones_RK.reshape(-1))


def id_dtype(spec: RoutingSpec) -> torch.dtype:
    """The width of ids in a trace of this model, as a torch type."""
    return torch.uint8 if spec.id_dtype == np.uint8 else torch.uint16


def boundary_margin(scores_RE: Tensor, ids_RK: Tensor, values_RK: Tensor) -> Tensor:
    """[R], K-th minus (K+1)-th score, where the picks `ids_RK` have `values_RK`; 0 where every expert is picked."""
    if ids_RK.shape[-1] == scores_RE.shape[-1]:
        return torch.zeros_like(values_RK[:, 0])
    return values_RK.amin(-1) - scores_RE.scatter(-1, ids_RK, -torch.inf).amax(-1)


def selection_mass(values_RK: Tensor, *, by_probability: bool) -> Tensor:
    """[R, K], shares of a router's picks in what it selected by: scores if probabilities, else their exponentials."""
    mass_RK = values_RK.clamp_min(0) if by_probability else (values_RK - values_RK.amax(-1, keepdim=True)).exp()
    return mass_RK / mass_RK.sum(-1, keepdim=True).clamp_min(torch.finfo(mass_RK.dtype).tiny)
