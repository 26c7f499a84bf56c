"""Sums over passes of how routers' own selections agree with the replayed ones, on the device until asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.replay.notes import PassNotes, required
from foreroute.replay.rows import ReplayRows, to_device


class AgreementSums:
    """Adds up passes.

    Args:
        log10_edges: edges [B + 1] of the margin histogram.
    """

    def __init__(self, log10_edges: NDArray[np.float64]) -> None:
        self._edges = log10_edges
        self._edges_there: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, notes: PassNotes, rows: ReplayRows) -> None:
        """Add one pass: its rows that were replayed, and no others."""
        own_LRK, routed_R = required(notes.own_ids_LRK), rows.routed_R
        device, num_layers = routed_R.device, len(own_LRK)
        kept_LRK = is_in(own_LRK, rows.ids_LRK)
        shared_LR = kept_LRK.sum(-1)
        differs_LR = (shared_LR < own_LRK.shape[-1]) & routed_R
        per_row_R = differs_LR.sum(0)
        mass_LRK = selection_mass(required(notes.own_values_LRK), required(notes.by_probability_L))
        bins_LR = self._bins(notes.margin_LR)
        histogram = torch.zeros(num_layers, len(self._edges) - 1, dtype=torch.int64, device=device)
        parts = {
            "rows": routed_R.sum(),
            "differing_L": differs_LR.sum(1),
            "shared_L": (shared_LR * routed_R).sum(1),
            "by_differing_layers": _histogram(per_row_R, routed_R, num_layers + 1),
            "first_differing_L": _histogram(differs_LR.int().argmax(0), per_row_R > 0, num_layers),
            "margins_LB": histogram.scatter_add(1, bins_LR, routed_R.long().expand_as(bins_LR)),
            "margins_differing_LB": histogram.scatter_add(1, bins_LR, differs_LR.long()),
            "replaced_mass_L": (mass_LRK * (~kept_LRK & routed_R[:, None])).sum((1, 2), dtype=torch.float64),
        }
        for name, part in parts.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def to_host(self) -> dict[str, NDArray[Any]]:
        """The sums so far, by name; empty before the first pass."""
        return {name: value.cpu().numpy() for name, value in self._sums.items()}

    def _bins(self, margin_LR: Tensor) -> Tensor:
        if self._edges_there is None:
            self._edges_there = to_device(self._edges, margin_LR.device)
        bins_LR = torch.bucketize(margin_LR.double().log10(), self._edges_there, right=True) - 1
        return bins_LR.clamp(0, len(self._edges) - 2)


def is_in(ids_LRK: Tensor, others_LRK: Tensor) -> Tensor:
    """Bool [L, R, K], which ids are among the other K of their row. Takes memory of the size of its result only."""
    ids, others = (_comparable(each) for each in (ids_LRK, others_LRK))
    found = ids == others[..., :1]
    for k in range(1, others.shape[-1]):
        found |= ids == others[..., k : k + 1]
    return found


def selection_mass(values_LRK: Tensor, by_probability_L: Tensor) -> Tensor:
    """[L, R, K], shares of a router's picks in what it selected by: scores if probabilities, else their exponentials.

    A selection bias may push a score below 0; it then has no share.
    """
    from_logits = (values_LRK - values_LRK.amax(-1, keepdim=True)).exp()
    mass = torch.where(by_probability_L[:, None, None], values_LRK.clamp_min(0), from_logits)
    return mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)


def count_experts(ids_LRK: Tensor, real_R: Tensor, num_experts: int) -> Tensor:
    """int64 [L, E], how many rows that are no padding have each expert among their ids."""
    counts = torch.zeros(len(ids_LRK), num_experts, dtype=torch.int64, device=real_R.device)
    ones_LRK = real_R.long()[:, None].expand_as(ids_LRK)
    return counts.scatter_add(1, ids_LRK.long().flatten(1), ones_LRK.flatten(1))


def _comparable(ids: Tensor) -> Tensor:
    """Torch compares no unsigned integers wider than a byte."""
    return ids.view(torch.int16) if ids.dtype == torch.uint16 else ids


def _histogram(values_R: Tensor, counted_R: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values_R.device)
    return counts.scatter_add(0, values_R, counted_R.long())
