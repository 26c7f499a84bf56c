"""What routers do natively beside what is replayed: sums over passes, on the device until somebody reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Listener, Pass, is_in
from foreroute.mismatch import LOG10_EDGES, LiveAgreement
from foreroute.replay.rows import ReplayRows, to_device
from foreroute.trace import RoutingSpec


class ReplayCounts(Listener):
    """Counts what passes replayed, on the device: nothing here waits. Open it beside a replay by `model.listening`.

    Rows are those that were replayed, padding left out; a cell is a row in one layer.

    Attributes:
        sums: int64 [5] on the device, one for each of `NAMES`; None before the first replayed pass.
    """

    NAMES = ("rows", "differing_rows", "cells", "differing_cells", "native_differing_cells")
    """`differing`: computed by other experts than the replayed ones. `native_differing`: the router would have picked
    other experts."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add a pass that replayed rows."""
        if current is None or not isinstance(current.rows, ReplayRows):
            return
        rows = current.rows
        replayed_R = rows.routed_R & rows.real_R
        differs_LR = ~is_in(current.executed_LRK, rows.ids_LRK).all(-1) & replayed_R
        native_differs_LR = ~is_in(current.own_LRK, rows.ids_LRK).all(-1) & replayed_R
        num_rows = replayed_R.sum()
        added = torch.stack(
            [num_rows, differs_LR.any(0).sum(), num_rows * len(differs_LR), differs_LR.sum(), native_differs_LR.sum()]
        )
        self.sums = added if self.sums is None else self.sums + added


class Telemetry:
    """Sums of one chunk of a model.

    Args:
        spec: of the chunk.
    """

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self._edges: Tensor | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, current: Pass, rows: ReplayRows) -> None:
        """Add one pass. Rows that were replayed count, and no others; padding that replay picks for is no route."""
        own_LRK, scores = current.own_LRK, current.scores
        assert scores is not None, "telemetry watches scores"
        routed_R = rows.routed_R & rows.real_R
        device, num_layers = routed_R.device, len(own_LRK)
        kept_LRK = is_in(own_LRK, rows.ids_LRK)
        shared_LR = kept_LRK.sum(-1)
        differs_LR = (shared_LR < own_LRK.shape[-1]) & routed_R
        picked, counted_LRK = scores.picked, current.executed_LRK if rows.counts == "replayed" else own_LRK
        if self._spec.sizes:  # -1 behind the picks of a layer is in both, and is no expert
            behind_LRK = own_LRK < 0
            shared_LR = shared_LR - behind_LRK.sum(-1)
            picked = picked.masked_fill(behind_LRK, -torch.inf)
            counted_LRK = counted_LRK.long().masked_fill(behind_LRK, self._spec.num_experts)
        per_row_R = differs_LR.sum(0)
        mass_LRK = selection_mass(picked, scores.by_probability)
        margin_LR = scores.margin()
        bins_LR = self._bins(margin_LR)
        histogram = torch.zeros(num_layers, len(LOG10_EDGES) - 1, dtype=torch.int64, device=device)
        parts = {
            "rows": routed_R.sum(),
            "differing_L": differs_LR.sum(1),
            "shared_L": (shared_LR * routed_R).sum(1),
            "by_differing_layers": _histogram(per_row_R, routed_R, num_layers + 1),
            "first_differing_L": _histogram(differs_LR.int().argmax(0), per_row_R > 0, num_layers),
            "margins_LB": histogram.scatter_add(1, bins_LR, (routed_R & ~margin_LR.isnan()).long()),
            "replaced_mass_L": (mass_LRK * (~kept_LRK & routed_R[:, None])).sum((1, 2), dtype=torch.float64),
            "counts_LE": count_experts(counted_LRK, rows.real_R, self._spec.num_experts + bool(self._spec.sizes)),
        }
        for name, part in parts.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def agreement(self) -> LiveAgreement | None:
        """None before the first pass. Waits for the device, once."""
        sums = {name: value.cpu().numpy() for name, value in self._sums.items()}
        return LiveAgreement.from_sums(sums, self._spec.picks_L) if sums else None

    @property
    def counts_LE(self) -> NDArray[np.int64] | None:
        """int64 [L, E], tokens of each expert without padding; None before the first pass. Waits for the device."""
        return self._sums["counts_LE"].cpu().numpy()[:, : self._spec.num_experts] if self._sums else None

    def _bins(self, margin_LR: Tensor) -> Tensor:
        if self._edges is None:
            self._edges = to_device(LOG10_EDGES, margin_LR.device)
        logs_LR = margin_LR.double().clamp_min(10 ** LOG10_EDGES[0]).log10()  # of less than 0 there is none
        bins_LR = torch.bucketize(logs_LR, self._edges, right=True) - 1
        return bins_LR.clamp(0, len(LOG10_EDGES) - 2)


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


def _histogram(values_R: Tensor, counted_R: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values_R.device)
    return counts.scatter_add(0, values_R, counted_R.long())
