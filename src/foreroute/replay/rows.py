"""The routes that one forward pass replays, on the device that runs it, and what becomes of rows without a route.

Row p routes input position p, and attention carries what it did to every later position. So the log-probability of a
token was computed under the routing of the rollout only if every row *before* the token was replayed. The row of the
last token of a sequence is before no token: no engine computes it, and it is routed by the model under every policy.

Letters: N packed rows of a trace, R rows of a batch, padding included, L routed layers, K picks, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Rows, signed_dtype
from foreroute.errors import BatchMismatchError
from foreroute.layout.rank_rows import fill_padding
from foreroute.replay.arguments import require_choice, require_switches
from foreroute.trace import RoutingSpec, RoutingTrace

if TYPE_CHECKING:
    from foreroute.replay.indexers import IndexerRows

MOST_SPREAD_ROWS = 1 << 16
"""Rows of picks for padding, after which they begin anew: no model of equal layers has more."""
NATIVE, SPREAD = -1, -2
"""Rows of a batch that are padding: the model picks for `NATIVE`; `SPREAD - p` has row p of the spread picks."""
Counts = Literal["native", "replayed"]
"""Selection that counts: the router's own one, or the executed one (replayed, and its own where no route is)."""

MissingRows = Literal["error", "native", "drop"]
"""Treatment when a row other than the last of its sequence has no route: refuse the batch ("error"), let the model
route it and use every token ("native"), or that and take later tokens of the sequence out of the loss ("drop")."""

PaddingRows = Literal["spread", "native"]
"""Side that picks for padding: replay, evenly over ranks and experts ("spread"), or the model ("native")."""


@dataclass(frozen=True)
class Policy:
    """Rules of a replay, as `RoutedModel.replay` describes it."""

    missing: MissingRows
    padding: PaddingRows
    counts: Counts
    telemetry: bool

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a choice that there is not."""
        for name, choices in (("missing", MissingRows), ("padding", PaddingRows), ("counts", Counts)):
            require_choice(name, getattr(self, name), choices)
        require_switches(telemetry=self.telemetry)


class PlacedRows(NamedTuple):
    """Places of a rank's rows among those of their micro-batch, and what is replayed beside them."""

    num_rows: int  # N, rows of the micro-batch, on whatever rank
    row_R: Tensor  # integers [R], the packed row of each; N for padding
    before_LRK: Tensor  # what is replayed in the row before, of the same sequence; -1 where nothing is
    after_LRK: Tensor  # the same of the row behind


@dataclass(frozen=True, kw_only=True)
class ReplayRows(Rows):
    """Routes for every row of a flattened batch, and what a session knows of it."""

    real_R: Tensor  # bool [R], False for padding
    counted_R: Tensor  # bool [R], tokens that belong in the loss under the policy for missing rows; no padding
    padding_R: Tensor | None = None  # bool [R], what statistics leave out; None where that is the framework's work
    counts: Counts = "native"  # which selection auxiliary losses and expert-bias counters count
    cells: Any = None  # of the plan that is executed on them, as its execution keeps them
    indexers: IndexerRows | None = None  # the choices to force; None leaves indexers alone
    loss_mask: Callable[[], Tensor] | None = None  # gives `counted_R` as bool [B, T], as the model is given its tokens
    drops: bool = False  # whether the loss must be masked, as rows are missing
    # asked by `RootRows`; None where the rows that are no padding are a whole batch, sequence after sequence
    placed: Callable[[], PlacedRows] | None = None

    @property
    def routed_R(self) -> Tensor:
        """Bool [R], rows that have a route."""
        return self.ids_LRK[0, :, 0] >= 0


class TraceOnDevice:
    """A trace on the device of its batches, moved there once for all of them. Nobody may write to it from now on.

    `picks_PLK` are repeated over padding that is spread, by default evenly over the experts of each layer. A trace that
    was cut inside of its sequences says which rows are faithful, as `faithful_rows`.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        device: torch.device,
        *,
        picks_PLK: NDArray[Any] | None = None,
        faithful_N: NDArray[np.bool_] | None = None,
    ) -> None:
        self.trace, self.device = trace, device
        self.faithful_N = faithful_rows(trace) if faithful_N is None else faithful_N
        self.picks_PLK = picks_PLK
        self._tables: dict[bool, Tensor] = {}
        self._there: dict[str, Tensor] = {}

    def upload(self, name: str, *parts: NDArray[Any]) -> Tensor:
        """Move arrays, one after the other, to the device once: they stay there under a name."""
        if name not in self._there:
            self._there[name] = joined_to_device(parts, self.device)
        return self._there[name]

    def counted_N(self, policy: Policy) -> NDArray[np.bool_] | None:
        """Bool [N], tokens that belong in the loss; None where all do."""
        return None if policy.missing != "drop" or self.faithful_N.all() else self.faithful_N

    def gather(
        self,
        row_R: Tensor,
        policy: Policy,
        indexers: IndexerRows | None = None,
        layers: slice | None = None,
        *,
        is_complete: bool = False,
    ) -> ReplayRows:
        """Gather the routes of each row of a batch, once for all layers. The host waits for nothing.

        The model routes rows without a route itself, under "error" too: who refuses them calls `refuse_missing`.

        Args:
            row_R: integers [R] on the device, the packed row of each; for padding `NATIVE`, which the policy may have
                spread, or `SPREAD - p` for row p of the spread picks.
            policy: whose policies for missing rows and padding hold.
            indexers: the choices to force on indexers, of the same rows.
            layers: of the trace; all by default.
            is_complete: as of `Rows`.
        """
        real_R, row_R, num_rows = row_R >= 0, row_R.long(), len(self.faithful_N)
        table_LXK = self._table(spreads=policy.padding == "spread" or self.picks_PLK is not None)
        if policy.padding == "spread":
            assert self.picks_PLK is not None, "made with the table"
            nth_R = ((row_R == NATIVE).cumsum(0) - 1) % len(self.picks_PLK)
            row_R = torch.where(row_R == NATIVE, SPREAD - nth_R, row_R)
        # Padding stands behind the N rows of the trace: -1 is row N of the table, -2 the one after it.
        from_R = torch.where(real_R, row_R, num_rows - 1 - row_R)
        counted_N, counted_R = self.counted_N(policy), real_R
        if counted_N is not None:
            counted_R = real_R & self.upload("counted", counted_N, np.zeros(1, np.bool_))[from_R.clamp(max=num_rows)]
        ids_LRK = (table_LXK if layers is None else table_LXK[layers]).index_select(1, from_R)
        return ReplayRows(
            ids_LRK,
            real_R=real_R,
            is_complete=is_complete,
            counted_R=counted_R,
            counts=policy.counts,
            indexers=indexers,
            drops=counted_N is not None,
        )

    def _table(self, *, spreads: bool) -> Tensor:
        """Signed ids [L, N + 1, K], or with the spread picks behind them; -1 where the model picks, as in row N."""
        if spreads not in self._tables:
            trace, spec = self.trace, self.trace.spec
            if spreads and self.picks_PLK is None:
                self.picks_PLK = spread_picks(spec)
            picks_PLK = self.picks_PLK if spreads and self.picks_PLK is not None else trace.expert_ids_NLK[:0]
            filler_1LK = np.zeros((1, *trace.expert_ids_NLK.shape[1:]), spec.id_dtype)
            narrow = joined_to_device((trace.expert_ids_NLK, filler_1LK, picks_PLK), self.device)
            # ids travel as narrow as they are kept; only here is there room for -1
            table_LXK = narrow.transpose(0, 1).to(signed_dtype(spec.num_experts), memory_format=torch.contiguous_format)
            if table_LXK.dtype == torch.int32:  # ids above 32,767 came as negative int16
                table_LXK.bitwise_and_(0xFFFF)
            is_native_X = joined_to_device(
                (~trace.valid_N, np.ones(1, np.bool_), np.zeros(len(picks_PLK), np.bool_)), self.device
            )
            table_LXK.masked_fill_(is_native_X[:, None], -1)
            if spec.sizes:
                table_LXK.masked_fill_(~self.upload("is pick", spec.is_pick_LK)[:, None], -1)
            self._tables[spreads] = table_LXK
        return self._tables[spreads]


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Move an array to a device, which is not waited for; on the CPU the tensor shares its memory."""
    return torch.from_numpy(array) if device.type == "cpu" else joined_to_device([array], device)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy a tensor to the host, which waits for it."""
    host = tensor.detach().cpu()
    return np.asarray((host.float() if host.is_floating_point() else host).numpy())  # numpy knows no bfloat16


def joined_to_device(parts: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """Move arrays, one after the other, to a device, which is not waited for. uint16 is int16 there."""
    of_dtype = torch.from_numpy(np.empty(0, parts[0].dtype))
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    # A copy from memory that is not pinned would wait for what was launched before it.
    held = torch.empty(shape, dtype=of_dtype.dtype, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=held.numpy())
    return (held.view(torch.int16) if held.dtype == torch.uint16 else held).to(device, non_blocking=True)


def spread_picks(spec: RoutingSpec, home_LE: NDArray[np.integer] | None = None, start: int = 0) -> NDArray[Any]:
    """Make the picks [P, L, K] that are repeated over padding. Homes and start are those of `fill_padding`."""
    # after so many rows the cycle of experts begins anew
    repeats_after = [num_experts // math.gcd(num_experts, top_k) for num_experts, top_k, _ in spec.layers_by_size]
    num_rows = min(math.lcm(*repeats_after), MOST_SPREAD_ROWS)
    picks_PLK = np.full((num_rows, spec.num_layers, spec.top_k), spec.filler, spec.id_dtype)
    for num_experts, top_k, at in spec.layers_by_size:
        part = picks_PLK[:, at, :top_k]
        homes = np.zeros((part.shape[1], num_experts), np.int64) if home_LE is None else home_LE[at]
        picks_PLK[:, at, :top_k] = fill_padding(part, np.ones(num_rows, np.bool_), homes, start=start)
    return picks_PLK


def faithful_rows(trace: RoutingTrace) -> NDArray[np.bool_]:
    """Find the tokens before which every row of their sequence has a route, bool [N]; the first of each is one."""
    missing_before_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(~trace.valid_N)])
    first_N = np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    return np.asarray(missing_before_N1[:-1] == missing_before_N1[first_N])


def refuse_missing(trace: RoutingTrace, row_R: NDArray[np.int64], what: str = "route") -> None:
    """Raise `BatchMismatchError`, naming the first row where `what` is missing, unless all tokens are faithful."""
    tainted_R = (row_R >= 0) & ~faithful_rows(trace)[row_R] if trace.num_rows else np.zeros(1, np.bool_)
    if not tainted_R.any():
        return
    sequence = int(np.searchsorted(trace.offsets, row_R[tainted_R].min(), side="right") - 1)
    start, end = trace.offsets[sequence : sequence + 2]
    position = int(np.argmin(trace.valid_N[start:end]))
    raise BatchMismatchError(
        f"sequence {sequence} has no {what} at position {position}, and {int(tainted_R.sum())} later tokens of the "
        "batch depend on such rows. Record the missing rows, leave the sequence out, or say what to do without them: "
        'missing="drop" takes those tokens out of the loss, missing="native" lets the model route the rows'
    )
