"""The routes that one forward pass replays, on the device that runs it, and what becomes of rows without a route.

Row p routes input position p, and attention carries what it did to every later position. So the log-probability of a
token was computed under the routing of the rollout only if every row *before* the token was replayed. The row of the
last token of a sequence is before no token: no engine computes it, and it is routed by the model under every policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Rows, signed_dtype
from foreroute.errors import BatchMismatchError, ConfigError
from foreroute.layout.rank_rows import fill_padding
from foreroute.trace import RoutingSpec, RoutingTrace

if TYPE_CHECKING:
    from foreroute.replay.indexers import IndexerRows

MOST_SPREAD_ROWS = 1 << 16
"""Rows of picks for padding, after which they begin anew: no model of equal layers has more."""
Counts = Literal["native", "replayed"]
"""Whose selection counts: the router's own one, or the executed one (replayed, and its own where no route is)."""

MissingRows = Literal["error", "native", "drop"]
"""What to do when a row other than the last of its sequence has no route.

"error" refuses the batch. "native" lets the model route the row itself and uses every token. "drop" does the
same and takes every later token of the sequence out of the loss.
"""

PaddingRows = Literal["spread", "native"]
"""Who picks for padding: replay, evenly over expert-parallel ranks and experts ("spread"), or the model ("native")."""


@dataclass(frozen=True)
class Policy:
    """How to replay, as `RoutedModel.replay` describes it.

    Attributes:
        missing: what to do with rows that have no route.
        padding: who picks for padding.
        counts: which selection auxiliary losses and expert-bias counters count.
        telemetry: whether routers also select by themselves, for the agreement.
    """

    missing: MissingRows
    padding: PaddingRows
    counts: Counts
    telemetry: bool

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a choice that there is not."""
        for name, choices in (("missing", MissingRows), ("padding", PaddingRows), ("counts", Counts)):
            value = getattr(self, name)
            if not (isinstance(value, str) and value in get_args(choices)):
                raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}")
        require_switches(telemetry=self.telemetry)


@dataclass(frozen=True, kw_only=True)
class ReplayRows(Rows):
    """Routes for every slot of a flattened batch, and what a session knows of its slots.

    Attributes:
        real_R: bool [R], False for padding.
        counted_R: bool [R], tokens that belong in the loss under the policy for missing rows; False for padding.
        padding_R: bool [R], padding that statistics of the routers leave out; None where that is the framework's work.
        counts: which selection auxiliary losses and expert-bias counters count.
        drops: whether `counted_R` leaves out a row that is real; known on the host, and never set in a graph.
        is_whole: whether every slot has a route; known on the host, and never set in a graph.
        cells: of the plan that is executed on them, as its execution keeps them; None where none is.
        indexers: the choices to force on indexers; None leaves them alone.
    """

    real_R: Tensor
    counted_R: Tensor
    padding_R: Tensor | None = None
    counts: Counts = "native"
    drops: bool = False
    is_whole: bool = False
    cells: Any = None
    indexers: IndexerRows | None = None

    @property
    def routed_R(self) -> Tensor:
        """Bool [R], slots that have a route."""
        return self.ids_LRK[0, :, 0] >= 0

    @classmethod
    def from_host(
        cls,
        ids_LRK: Tensor,
        routed_R: NDArray[np.bool_],
        real_R: NDArray[np.bool_],
        counted_R: NDArray[np.bool_],
        device: torch.device,
        num_experts: int,
        *,
        mask_padding: bool = False,
        counts: Counts = "native",
    ) -> ReplayRows:
        """Move what is known on the host to the device, which is not waited for.

        Args:
            ids_LRK: uint8 or uint16 [L, R, K], in pinned memory where the device is a GPU; arbitrary without a route.
            routed_R: bool [R], slots that have a route.
            real_R: as the attribute.
            counted_R: as the attribute.
            device: where the model runs.
            num_experts: E.
            mask_padding: whether to fill `padding_R`.
            counts: as the attribute.
        """
        is_whole = bool(routed_R.all())
        # as narrow as they are on the way; -1 is for the device
        narrow = ids_LRK.view(torch.int16) if ids_LRK.dtype == torch.uint16 else ids_LRK
        ids = narrow.to(device, non_blocking=True).to(signed_dtype(num_experts))
        if ids.dtype == torch.int32:  # ids above 32,767 came as negative int16
            ids.bitwise_and_(0xFFFF)
        return cls(
            ids if is_whole else ids.masked_fill(~to_device(routed_R, device)[:, None], -1),
            real_R=to_device(real_R, device),
            counted_R=to_device(counted_R, device),
            padding_R=to_device(~real_R, device) if mask_padding else None,
            counts=counts,
            drops=bool((counted_R != real_R).any()),
            is_whole=is_whole,
        )


@dataclass(frozen=True, eq=False)
class TraceOnDevice:
    """A trace on the device that its batches are on: moved there once, for as many of them as there are.

    Attributes:
        trace: whose arrays nobody may write to from now on.
        device: of the batches.
    """

    trace: RoutingTrace
    device: torch.device
    _there: dict[str, Tensor] = field(default_factory=dict, init=False)
    _picks: dict[PaddingRows, NDArray[Any]] = field(default_factory=dict, init=False)  # for padding

    @cached_property
    def faithful_N(self) -> NDArray[np.bool_]:
        """As `faithful_rows`."""
        return faithful_rows(self.trace)

    def kept(self, name: str, *parts: NDArray[Any]) -> Tensor:
        """Arrays one after the other, on the device, where they stay under a name."""
        if name not in self._there:
            self._there[name] = joined_to_device(parts, self.device)
        return self._there[name]

    def gather(self, row_R: Tensor, policy: Policy, indexers: IndexerRows | None = None) -> ReplayRows:
        """Gather the routes of each slot, once for all layers. The host waits for nothing.

        The last token of a sequence, which no router saw in the rollout, stays unrouted: the model routes it itself,
        and padding too unless that is to be spread. Other rows without a route follow the policy, but nobody is told
        of them under "error": see `refuse_missing`.

        Args:
            row_R: int64 [R], packed row of each slot; -1 for padding. On the device.
            policy: whose policies for missing rows and padding hold.
            indexers: the choices to force on indexers, of the same slots. A row that has none is missing too.
        """
        trace, spec, real_R = self.trace, self.trace.spec, row_R >= 0
        num_rows, spreads = len(trace.valid_N), policy.padding == "spread"
        if policy.padding not in self._picks:
            nothing = np.zeros((1, spec.num_layers, spec.top_k), spec.id_dtype)
            self._picks[policy.padding] = _spread_picks(spec) if spreads else nothing
        padding = self._picks[policy.padding]  # follows the rows of the trace
        padding_R = num_rows + ((~real_R).cumsum(0) - 1) % len(padding) if spreads else num_rows
        source_R = torch.where(real_R, row_R, padding_R)

        ids_RLK = self.kept(f"ids {policy.padding}", trace.expert_ids_NLK, padding).index_select(0, source_R)
        shape = (spec.num_layers, len(row_R), spec.top_k)
        ids_LRK = torch.empty(shape, dtype=signed_dtype(spec.num_experts), device=self.device)
        ids_LRK.copy_(ids_RLK.transpose(0, 1))
        if ids_LRK.dtype == torch.int32:  # ids above 32,767 came as negative int16
            ids_LRK.bitwise_and_(0xFFFF)
        if spec.sizes:
            ids_LRK.masked_fill_(~self.kept("is pick", spec.is_pick_LK)[:, None], -1)
        if not trace.valid_N.all():
            forced = self.kept(f"valid {policy.padding}", trace.valid_N, np.full(len(padding), spreads))
            ids_LRK.masked_fill_(~forced.index_select(0, source_R)[:, None], -1)
        elif not spreads:
            ids_LRK.masked_fill_(~real_R[:, None], -1)
        counted_R, drops = real_R, False
        if policy.missing == "drop":
            name, faithful_N = "faithful", self.faithful_N
            if indexers is not None:
                name += " with choices"
                faithful_N = faithful_rows(replace(trace, valid_N=trace.valid_N & indexers.stream.valid_N))
            drops = not faithful_N.all()
            if drops:
                counted_R = real_R & self.kept(name, faithful_N)[row_R]
        return ReplayRows(
            ids_LRK,
            real_R=real_R,
            counted_R=counted_R,
            counts=policy.counts,
            drops=drops,
            indexers=indexers,
        )


def require_switches(**switches: object) -> None:
    """Raise `ConfigError` unless these arguments are True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; expected True or False")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array of the host on a device, which is not waited for; on the CPU the array itself."""
    return torch.from_numpy(array) if device.type == "cpu" else joined_to_device([array], device)


def joined_to_device(parts: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """Arrays of the host, one after the other, on a device, which is not waited for. uint16 is int16 there.

    They go by pinned memory: a copy from other memory would wait for what was launched before it.
    """
    of_dtype = torch.from_numpy(np.empty(0, parts[0].dtype))
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    held = torch.empty(shape, dtype=of_dtype.dtype, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=held.numpy())
    return (held.view(torch.int16) if held.dtype == torch.uint16 else held).to(device, non_blocking=True)


def _spread_picks(spec: RoutingSpec) -> NDArray[Any]:
    """Ids [P, L, K] that are repeated over padding, evenly over the experts."""
    repeats_after = [num_experts // math.gcd(num_experts, top_k) for num_experts, top_k, _ in spec.groups]
    num_rows = min(math.lcm(*repeats_after), MOST_SPREAD_ROWS)
    picks = np.full((num_rows, spec.num_layers, spec.top_k), spec.filler, spec.id_dtype)
    for num_experts, top_k, at in spec.groups:
        part = picks[:, at, :top_k]
        of_one_rank_LE = np.zeros((part.shape[1], num_experts), np.int64)
        picks[:, at, :top_k] = fill_padding(part, np.ones(num_rows, np.bool_), of_one_rank_LE)
    return picks


def faithful_rows(trace: RoutingTrace) -> NDArray[np.bool_]:
    """Bool [N], tokens before which every row of their sequence has a route.

    The first token of a sequence has no row before it. It is nowhere predicted, so that it may count as either.
    """
    missing_before_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(~trace.valid_N)])
    first_N = np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
    return np.asarray(missing_before_N1[:-1] == missing_before_N1[first_N])


def is_faithful(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool [R], as `faithful_rows`, of slots; False for padding."""
    real = row_of_slot >= 0
    return np.asarray(real & faithful_rows(trace)[row_of_slot]) if trace.num_rows else real


def refuse_missing(trace: RoutingTrace, row_of_slot: NDArray[np.int64], what: str = "route") -> None:
    """Raise unless every token of the batch is faithful. `what` is missing otherwise.

    Raises:
        BatchMismatchError: naming the first row that is missing.
    """
    tainted = (row_of_slot >= 0) & ~faithful_rows(trace)[row_of_slot] if len(trace.valid_N) else np.zeros(1, np.bool_)
    if not tainted.any():
        return
    sequence = int(np.searchsorted(trace.offsets, row_of_slot[tainted].min(), side="right") - 1)
    start, end = trace.offsets[sequence : sequence + 2]
    position = int(np.argmin(trace.valid_N[start:end]))
    raise BatchMismatchError(
        f"sequence {sequence} has no {what} at position {position}, and {int(tainted.sum())} later tokens of the batch "
        "depend on such rows. Record the missing rows, leave the sequence out, or say what to do without them: "
        'missing="drop" takes those tokens out of the loss, missing="native" lets the model route the rows'
    )
