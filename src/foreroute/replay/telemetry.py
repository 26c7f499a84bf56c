"""What routers do natively beside what is replayed: sums over passes, on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Interceptor, Pass, RecordOptions, add_to, is_in
from foreroute.mismatch import LOG10_EDGES, LiveAgreement
from foreroute.replay.rows import ReplayRows, to_device
from foreroute.trace import RoutingSpec


class Telemetry(Interceptor):
    """What routers do natively beside what is replayed, by chunk."""

    options = RecordOptions(scores=True)

    def __init__(self, specs: Sequence[RoutingSpec | None]) -> None:
        self._specs = specs  # of each chunk; None of one without routers
        self._edges: Tensor | None = None
        self._sums: dict[int, dict[str, Tensor]] = {}

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add one pass. Rows that were replayed count, and no others; padding that replay picks for is no route."""
        spec, rows = self._specs[chunk], None if current is None else current.rows
        if current is None or spec is None or not isinstance(rows, ReplayRows):
            return
        native_LRK, scores = current.native_LRK, current.scores
        assert scores is not None, "telemetry keeps scores"
        routed_R = rows.routed_R & rows.real_R
        device, num_layers = routed_R.device, len(native_LRK)
        is_replayed_LRK = is_in(native_LRK, rows.ids_LRK)
        shared_LR = is_replayed_LRK.sum(-1)
        differs_LR = (shared_LR < native_LRK.shape[-1]) & routed_R
        picked, counted_LRK = scores.picked, current.executed_LRK if rows.counts == "replayed" else native_LRK
        if spec.sizes:  # -1 behind the picks of a layer is in both, and is no expert
            behind_LRK = native_LRK < 0
            shared_LR = shared_LR - behind_LRK.sum(-1)
            picked = picked.masked_fill(behind_LRK, -torch.inf)
            counted_LRK = counted_LRK.long().masked_fill(behind_LRK, spec.num_experts)
        per_row_R = differs_LR.sum(0)
        mass_LRK = selection_mass(picked, scores.by_probability)
        margin_LR = scores.margin()
        histogram = torch.zeros(num_layers, len(LOG10_EDGES) - 1, dtype=torch.int64, device=device)
        parts = {
            "rows": routed_R.sum(),
            "differing_L": differs_LR.sum(1),
            "shared_L": (shared_LR * routed_R).sum(1),
            "by_differing_layers": _histogram(per_row_R, routed_R, num_layers + 1),
            # argmax gives the first of several layers, and 0 where there is none
            "first_differing_L": _histogram(differs_LR.int().argmax(0), per_row_R > 0, num_layers),
            "margins_LB": histogram.scatter_add(1, self._bins(margin_LR), (routed_R & ~margin_LR.isnan()).long()),
            "replaced_mass_L": (mass_LRK * (~is_replayed_LRK & routed_R[:, None])).sum((1, 2), dtype=torch.float64),
            "counts_LE": count_experts(counted_LRK, rows.real_R, spec.num_experts + bool(spec.sizes)),
        }
        add_to(self._sums.setdefault(chunk, {}), parts)

    def has_counted(self, chunk: int) -> bool:
        """Say whether a pass of a chunk was added."""
        return chunk in self._sums

    def agreement(self, chunk: int) -> LiveAgreement:
        """Join the sums of a chunk that has counted. Waits for the device, once."""
        return LiveAgreement.from_sums(_read_sums(self._sums[chunk]), self._spec_of(chunk).picks_L)

    def expert_counts_LE(self, chunk: int) -> NDArray[np.int64]:
        """int64 [L, E], tokens of each expert without padding, of a chunk that has counted. Waits for the device."""
        return self._sums[chunk]["counts_LE"].cpu().numpy()[:, : self._spec_of(chunk).num_experts]

    def _spec_of(self, chunk: int) -> RoutingSpec:
        spec = self._specs[chunk]
        assert spec is not None, "a chunk without routers counts nothing"
        return spec

    def _bins(self, margin_LR: Tensor) -> Tensor:
        if self._edges is None:
            self._edges = to_device(LOG10_EDGES, margin_LR.device)
        logs_LR = margin_LR.double().clamp_min(10 ** LOG10_EDGES[0]).log10()  # of less than 0 there is none
        bins_LR = torch.bucketize(logs_LR, self._edges, right=True) - 1
        return bins_LR.clamp(0, len(LOG10_EDGES) - 2)


def _read_sums(sums: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Copy all sums, and wait for the device once."""
    on_host = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in sums.items()}
    if any(value.is_cuda for value in sums.values()):
        torch.cuda.current_stream(next(iter(sums.values())).device).synchronize()
    return {name: value.numpy() for name, value in on_host.items()}


def selection_mass(values_LRK: Tensor, by_probability_L: Tensor) -> Tensor:
    """Give shares [L, R, K] of a router's picks in what it selected by: scores if probabilities, else exponentials.

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
