"""What routers do natively beside what is replayed: sums over passes, on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Interceptor, Pass, RecordOptions, add_to, is_in
from foreroute.mismatch import RoutingMismatch
from foreroute.replay.rows import ReplayRows
from foreroute.trace import RoutingSpec


class Telemetry(Interceptor):
    """What routers do natively beside what is replayed, by chunk."""

    options = RecordOptions(native=True)

    def __init__(self, specs: Sequence[RoutingSpec | None]) -> None:
        self._specs = specs  # of each chunk; None of one without routers
        self._sums: dict[int, dict[str, Tensor]] = {}

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add one pass. Rows that were replayed count, and no others; padding that replay picks for is no route."""
        spec, rows = self._specs[chunk], None if current is None else current.rows
        if current is None or spec is None or not isinstance(rows, ReplayRows):
            return
        native_LRK, routed_R = current.native_LRK, rows.routed_R & rows.real_R
        counted_LRK = current.executed_LRK if rows.counts == "replayed" else native_LRK
        shared_LR = is_in(native_LRK, rows.ids_LRK).sum(-1)
        differs_LR = (shared_LR < native_LRK.shape[-1]) & routed_R
        if spec.sizes:  # -1 behind the picks of a layer is in both, and is no expert
            behind_LRK = native_LRK < 0
            shared_LR = shared_LR - behind_LRK.sum(-1)
            counted_LRK = counted_LRK.long().masked_fill(behind_LRK, spec.num_experts)
        per_row_R, num_layers = differs_LR.sum(0), len(native_LRK)
        parts = {
            "rows": routed_R.sum(),
            "differing_L": differs_LR.sum(1),
            "shared_L": (shared_LR * routed_R).sum(1),
            "by_differing_layers": _histogram(per_row_R, routed_R, num_layers + 1),
            # argmax gives the first of several layers, and 0 where there is none
            "first_differing_L": _histogram(differs_LR.int().argmax(0), per_row_R > 0, num_layers),
            "counts_LE": _count_experts(counted_LRK, rows.real_R, spec.num_experts + bool(spec.sizes)),
        }
        add_to(self._sums.setdefault(chunk, {}), parts)

    def has_counted(self, chunk: int) -> bool:
        """Say whether a pass of a chunk was added."""
        return chunk in self._sums

    def agreement(self, chunk: int) -> RoutingMismatch:
        """Join the sums of a chunk that has counted. Waits for the device, once."""
        sums = {name: value for name, value in self._sums[chunk].items() if name != "counts_LE"}
        on_host = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in sums.items()}
        if sums["rows"].is_cuda:
            torch.cuda.current_stream(sums["rows"].device).synchronize()
        rows = int(on_host.pop("rows"))
        counted = {name: value.numpy() for name, value in on_host.items()}
        return RoutingMismatch(rows=rows, picks_L=self._spec_of(chunk).picks_L, **counted)

    def expert_counts_LE(self, chunk: int) -> NDArray[np.int64]:
        """int64 [L, E], tokens of each expert without padding, of a chunk that has counted. Waits for the device."""
        return self._sums[chunk]["counts_LE"].cpu().numpy()[:, : self._spec_of(chunk).num_experts]

    def _spec_of(self, chunk: int) -> RoutingSpec:
        spec = self._specs[chunk]
        assert spec is not None, "a chunk without routers counts nothing"
        return spec


def _count_experts(ids_LRK: Tensor, real_R: Tensor, num_experts: int) -> Tensor:
    """int64 [L, E], how many rows that are no padding have each expert among their ids."""
    counts = torch.zeros(len(ids_LRK), num_experts, dtype=torch.int64, device=real_R.device)
    ones_LRK = real_R.long()[:, None].expand_as(ids_LRK)
    return counts.scatter_add(1, ids_LRK.long().flatten(1), ones_LRK.flatten(1))


def _histogram(values_R: Tensor, counted_R: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values_R.device)
    return counts.scatter_add(0, values_R, counted_R.long())
