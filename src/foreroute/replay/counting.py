"""Native picks of routers on rows that are replayed: counts over passes, on the device until somebody reads them.

In a replayed pass all that comes before a router is the rollout's, so that a router which still disagrees, a root, is
no consequence of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from foreroute.core.passes import Interceptor, Pass, RecordOptions, add_to, is_in
from foreroute.errors import InputError, ReplayError
from foreroute.mismatch import RootCounts, RoutingMismatch
from foreroute.replay.rows import ReplayRows
from foreroute.trace import RoutingSpec

if TYPE_CHECKING:
    from foreroute.replay.session import RoutedModel


class Telemetry(Interceptor):
    """Native picks of routers beside what is replayed, by chunk."""

    options = RecordOptions(native=True)

    def __init__(self, specs: Sequence[RoutingSpec | None]) -> None:
        self._specs: Sequence[Any] = specs  # of each chunk; None of one without routers
        self.sums: dict[int, dict[str, Tensor]] = {}  # of each chunk that has counted

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
        add_to(self.sums.setdefault(chunk, {}), parts)

    def agreement(self, chunk: int) -> RoutingMismatch:
        """Join the sums of a chunk that has counted. Waits for the device, once."""
        sums = {name: value for name, value in self.sums[chunk].items() if name != "counts_LE"}
        on_host = {name: value.to("cpu", non_blocking=value.is_cuda) for name, value in sums.items()}
        if sums["rows"].is_cuda:
            torch.cuda.current_stream(sums["rows"].device).synchronize()
        counted: dict[str, Any] = {name: value.numpy() for name, value in on_host.items()}
        return RoutingMismatch(**counted | {"rows": int(counted["rows"]), "picks_L": self._specs[chunk].picks_L})

    def expert_counts_LE(self, chunk: int) -> NDArray[np.int64]:
        """int64 [L, E], tokens of each expert without padding, of a chunk that has counted. Waits for the device."""
        return self.sums[chunk]["counts_LE"].cpu().numpy()[:, : self._specs[chunk].num_experts]


class RootRows(Interceptor):
    """Counts the roots of each row in replayed passes of a model, which `foreroute.mismatch.Sentinel` judges.

    Nothing waits before `read`. Every rank of the model has one. `sum_over_ranks` adds integers up over the ranks that
    share rows or layers of a batch; by default over those that the model knows.
    """

    options = RecordOptions(native=True)

    def __init__(self, routed: RoutedModel, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        self._routed = routed
        self._sum = sum_over_ranks or routed.sum_over_ranks
        self._passes: list[list[_Counted]] = [[] for _ in routed.chunks]

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Count a pass that replayed rows."""
        if current is None or current.rows is None:
            return
        ids_LRK, native_LRK, replayed_LR = current.rows.ids_LRK, current.native_LRK, current.replayed_LR
        passes = self._passes[chunk]
        before = passes[-1].num_rows if passes else 0
        num_rows: int | Tensor
        if isinstance(current.rows, ReplayRows) and current.rows.placed is not None:
            num_here, at_R, before_LRK, after_LRK = current.rows.placed()
            num_rows, at_R = before + num_here, before + at_R
        else:
            real_R = replayed_LR.any(0) if current.rows.real_R is None else current.rows.real_R
            seen_R = before + real_R.cumsum(0)
            num_rows, at_R = seen_R[-1], (seen_R - 1).clamp(min=0)
            known_LRK = ids_LRK.masked_fill(~replayed_LR[..., None], -1)
            before_LRK = functional.pad(known_LRK[:, :-1], (0, 0, 1, 0), value=-1)
            after_LRK = functional.pad(known_LRK[:, 1:], (0, 0, 0, 1), value=-1)
        roots_LR = current.roots_LR
        # natives are none of -1, so that rows that nothing is replayed beside are like nothing
        beside = (
            is_in(native_LRK, before_LRK).all(-1),
            is_in(native_LRK, after_LRK).all(-1),
            (ids_LRK == before_LRK).all(-1),
        )
        rows_4R = torch.stack([roots_LR.sum(0), *((each & replayed_LR).sum(0) for each in beside)]).int()
        passes.append(_Counted(rows_4R, at_R, num_rows, roots_LR.sum(1, dtype=torch.int32)))

    def read(self, lengths_S: Any) -> RootCounts:
        """Give what was counted of S sequences, packed in the order in which passes ran them, and start anew.

        Waits for the device, once: call it where the host waits anyway. `lengths_S` are the rows of each sequence. On
        every rank of the model it gives the same. A collective call of these.

        Raises:
            ReplayError: when no pass ran.
            InputError: for lengths of other rows than were counted.
        """
        spec, num_rows = self._routed.spec, int(np.sum(lengths_S))
        passes, self._passes = self._passes, [[] for _ in self._passes]
        # a rank that has no router has none to count, and has parameters
        of_devices = [each.rows_4R.device for of_chunk in passes for each in of_chunk]
        device = (of_devices or [next(self._routed.chunks[0].trunk.parameters()).device])[0]
        rows_4N = torch.zeros((4, num_rows + 1), dtype=torch.int32, device=device)  # one for what there is no room for
        roots_L = torch.zeros(spec.num_layers, dtype=torch.int32, device=device)
        chunks_2 = torch.zeros(2, dtype=torch.int32, device=device)  # that counted, and that counted other rows
        for of_chunk, counted in zip(self._routed.chunk_specs, passes, strict=True):
            if of_chunk is None or not counted:
                continue
            at_R = torch.cat([each.at_R for each in counted]).clamp(max=num_rows)
            rows_4N.index_add_(1, at_R, torch.cat([each.rows_4R for each in counted], 1))
            first = spec.layers.index(of_chunk.layers[0])
            roots_L[first : first + of_chunk.num_layers] += torch.stack([each.roots_L for each in counted]).sum(0)
            chunks_2[0] += 1
            chunks_2[1] += counted[-1].num_rows != num_rows
        counts = self._sum(torch.cat([rows_4N[:, :-1].flatten(), roots_L, chunks_2])).cpu().numpy()
        of_rows, of_layers, (num_chunks, num_wrong) = np.split(counts, [4 * num_rows, len(counts) - 2])
        if not num_chunks:
            raise ReplayError("no pass was counted: open listening(rows) around a replayed forward of the model")
        if num_wrong:
            raise InputError(f"lengths_S has {num_rows} rows, and passes counted others; give those of all passes")
        roots_N, before_N, after_N, repeats_N = of_rows.reshape(4, num_rows)
        return RootCounts(roots_N, before_N, after_N, repeats_N, of_layers, lengths_S)


class _Counted(NamedTuple):
    """Counts of one pass of a chunk, on the device."""

    rows_4R: Tensor  # int32; 0 for padding
    at_R: Tensor  # integers, the place of each among the rows of all passes
    num_rows: int | Tensor  # of this pass and those before it
    roots_L: Tensor  # int32


def _count_experts(ids_LRK: Tensor, real_R: Tensor, num_experts: int) -> Tensor:
    """int64 [L, E], how many rows that are no padding have each expert among their ids."""
    counts = torch.zeros(len(ids_LRK), num_experts, dtype=torch.int64, device=real_R.device)
    ones_LRK = real_R.long()[:, None].expand_as(ids_LRK)
    return counts.scatter_add(1, ids_LRK.long().flatten(1), ones_LRK.flatten(1))


def _histogram(values_R: Tensor, counted_R: Tensor, size: int) -> Tensor:
    counts = torch.zeros(size, dtype=torch.int64, device=values_R.device)
    return counts.scatter_add(0, values_R, counted_R.long())
