"""Sums over passes of how a router's own selections agree with the replayed ones, on the device until asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.replay.notes import LayerNotes


class AgreementSums:
    """Adds up passes.

    Args:
        top_k: K.
        log10_edges: edges [B + 1] of the margin histogram.
    """

    def __init__(self, top_k: int, log10_edges: NDArray[np.float64]) -> None:
        self._top_k = top_k
        self._edges = log10_edges
        self._sums: dict[str, Tensor] = {}

    def add(self, layers: list[LayerNotes], routed_R: Tensor) -> None:
        """Add one pass: its rows that were replayed, and no others."""
        device = routed_R.device
        shared_LR = torch.stack([_noted(notes.shared_R).to(device) for notes in layers]).long()
        margin_LR = torch.stack([_noted(notes.margin_R).to(device) for notes in layers])
        replaced_LR = torch.stack([_noted(notes.replaced_R).to(device) for notes in layers])
        differs_LR = (shared_LR < self._top_k) & routed_R
        per_row_R = differs_LR.sum(0)
        num_layers = len(layers)
        bins_LR = self._bins(margin_LR)
        histogram = torch.zeros(num_layers, len(self._edges) - 1, dtype=torch.int64, device=device)
        routed_LR = routed_R.long().expand_as(bins_LR)
        parts = {
            "rows": routed_R.sum(),
            "differing_L": differs_LR.sum(1),
            "shared_L": (shared_LR * routed_R).sum(1),
            "by_differing_layers": _histogram(per_row_R, routed_R, num_layers + 1),
            "first_differing_L": _histogram(differs_LR.int().argmax(0), per_row_R > 0, num_layers),
            "margins_LB": histogram.scatter_add(1, bins_LR, routed_LR),
            "margins_differing_LB": histogram.scatter_add(1, bins_LR, differs_LR.long()),
            "replaced_mass_L": torch.where(routed_R, replaced_LR, 0.0).sum(1, dtype=torch.float64),
        }
        for name, part in parts.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def to_host(self) -> dict[str, NDArray[Any]]:
        """The sums so far, by name; empty before the first pass."""
        return {name: value.cpu().numpy() for name, value in self._sums.items()}

    def _bins(self, margin_LR: Tensor) -> Tensor:
        edges = torch.from_numpy(self._edges).to(margin_LR.device)
        logs = margin_LR.double().log10()
        return (torch.bucketize(logs, edges, right=True) - 1).clamp(0, len(self._edges) - 2)


def _histogram(values_R: Tensor, counted_R: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values_R.device)
    return counts.scatter_add(0, values_R, counted_R.long())


def _noted(value: Tensor | None) -> Tensor:
    assert value is not None, "a session that adds up agreement watches the comparison"
    return value
