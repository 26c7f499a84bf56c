"""The routes that one forward pass replays, on the device that runs it, and what becomes of rows without a route.

Row p routes input position p, and attention carries what it did to every later position. So the log-probability of a
token was computed under the routing of the rollout only if every row *before* the token was replayed. The row of the
last token of a sequence is before no token: no engine computes it, and it is routed by the model under every policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import Rows, signed_dtype
from foreroute.errors import BatchMismatchError, ConfigError
from foreroute.layout import fill_padding
from foreroute.replay.indexers import IndexerRows
from foreroute.trace import RoutingTrace

Counts = Literal["native", "replayed"]
"""Whose selection counts: the router's own one, or the executed one (replayed, and its own where no route is)."""

MissingRows = Literal["error", "native", "drop"]
"""What to do when a row other than the last of its sequence has no route.

"error" refuses the batch. "native" lets the model route the row itself and uses every token. "drop" routes likewise and
takes every later token of the sequence out of the loss.
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
        gate_weights: whether the gate weights of the trace are forced too.
    """

    missing: MissingRows
    padding: PaddingRows
    counts: Counts
    telemetry: bool
    gate_weights: bool

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a choice that there is not."""
        require_choice("missing", self.missing, MissingRows)
        require_choice("padding", self.padding, PaddingRows)
        require_choice("counts", self.counts, Counts)
        require_switch("telemetry", self.telemetry)
        require_switch("gate_weights", self.gate_weights)


@dataclass(frozen=True, kw_only=True)
class ReplayRows(Rows):
    """Routes for every slot of a flattened batch, and what a session knows of its slots.

    Attributes:
        real_R: bool [R], False for padding.
        counted_R: bool [R], tokens that belong in the loss under the policy for missing rows; False for padding.
        padding_R: bool [R], padding that statistics of the routers leave out; None where that is the framework's work.
        counts: which selection auxiliary losses and expert-bias counters count.
        drops: whether `counted_R` leaves out a row that is real; known on the host, and never set in a graph.
        is_whole: whether every slot has a route; likewise.
        micro_step: of the plan that is executed on them; None where none is.
        indexers: the choices to force on indexers; None leaves them alone.
    """

    real_R: Tensor
    counted_R: Tensor
    padding_R: Tensor | None = None
    counts: Counts = "native"
    drops: bool = False
    is_whole: bool = False
    micro_step: int | None = None
    indexers: IndexerRows | None = None

    @property
    def routed_R(self) -> Tensor:
        """Bool [R], slots that have a route."""
        return self.ids_LRK[0, :, 0] >= 0

    @classmethod
    def gather(
        cls,
        trace: RoutingTrace,
        row_of_slot: NDArray[np.int64],
        device: torch.device,
        missing: MissingRows = "error",
        *,
        weights: bool = False,
        spread_padding: bool = False,
        counts: Counts = "native",
        indexers: IndexerRows | None = None,
    ) -> ReplayRows:
        """Fetch the routes of each slot and move them to the device, once for all layers.

        The last token of a sequence, which no router saw in the rollout, stays unrouted: the model routes it itself,
        and padding too unless that is to be spread. Other rows without a route follow the policy.

        Args:
            trace: where the rows are.
            row_of_slot: int64 [R], packed row of each slot; -1 for padding.
            device: where the model runs.
            missing: the policy.
            weights: whether to fetch gate weights too, which the trace must have.
            spread_padding: whether to pick for padding too, evenly over the experts.
            counts: which selection is to be counted.
            indexers: the choices to force on indexers, of the same slots. A row that has none is missing too.

        Raises:
            BatchMismatchError: under "error", when a row is missing that later tokens depend on.
        """
        real = row_of_slot >= 0
        decided = trace if indexers is None else replace(trace, valid_N=trace.valid_N & indexers.stream.valid_N)
        is_whole = bool(decided.valid_N.all())  # then every row has a route, and none is missing
        if missing == "error" and not is_whole:
            refuse_missing(trace, row_of_slot)
            refuse_missing(decided, row_of_slot, what="choice of indexers")
        routed = real if is_whole else is_routed(trace, row_of_slot)
        # a copy: whoever is given the loss mask may write to it, and on the CPU tensors share the memory of arrays
        counted = is_faithful(decided, row_of_slot) if missing == "drop" and not is_whole else real.copy()
        ids_RLK = _of_slots(trace.expert_ids_NLK, row_of_slot)
        if spread_padding:
            of_one_rank_LE = np.zeros((trace.spec.num_layers, trace.spec.num_experts), np.int64)
            ids_RLK, routed = fill_padding(ids_RLK, ~real, of_one_rank_LE), routed | ~real
        ids_LRK = np.ascontiguousarray(ids_RLK.transpose(1, 0, 2))
        weights_LRK = None
        if weights and trace.gate_weights_NLK is not None:
            weights_LRK = np.ascontiguousarray(_of_slots(trace.gate_weights_NLK, row_of_slot).transpose(1, 0, 2))
        pinned = _pinned(ids_LRK, device)
        rows = cls.from_host(
            pinned, routed, real, counted, device, trace.spec.num_experts, weights_LRK=weights_LRK, counts=counts
        )
        return replace(rows, indexers=indexers)

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
        weights_LRK: NDArray[np.float32] | None = None,
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
            weights_LRK: float32 [L, R, K], gate weights to force; arbitrary for padding and without a route.
            mask_padding: whether to fill `padding_R`.
            counts: as the attribute.
        """
        is_whole = bool(routed_R.all())
        # as narrow as they are on the way; -1 is for the device
        narrow = ids_LRK.view(torch.int16) if ids_LRK.dtype == torch.uint16 else ids_LRK
        ids = narrow.to(device, non_blocking=True).to(signed_dtype(num_experts))
        weights = None
        if weights_LRK is not None:
            weights = to_device(np.where((routed_R & real_R)[:, None], weights_LRK, np.float32("nan")), device)
        return cls(
            ids if is_whole else ids.masked_fill(~to_device(routed_R, device)[:, None], -1),
            weights,
            real_R=to_device(real_R, device),
            counted_R=to_device(counted_R, device),
            padding_R=to_device(~real_R, device) if mask_padding else None,
            counts=counts,
            drops=bool((counted_R != real_R).any()),
            is_whole=is_whole,
        )


def require_choice(name: str, value: object, choices: Any) -> None:
    """Raise `ConfigError` unless `value` is one of the words of a `Literal`."""
    if not (isinstance(value, str) and value in get_args(choices)):
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}")


def require_switch(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; expected True or False")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array of the host on a device, which is not waited for; on the CPU the array itself."""
    return _pinned(array, device).to(device, non_blocking=True)


def _pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy from other memory would wait for what was launched before it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _of_slots(values_NLK: NDArray[Any], row_of_slot: NDArray[np.int64]) -> NDArray[Any]:
    """[R, L, K], arbitrary for padding; zeros where all is padding of an empty trace."""
    if not len(values_NLK):
        return np.zeros((len(row_of_slot), *values_NLK.shape[1:]), values_NLK.dtype)
    return np.asarray(values_NLK[row_of_slot])


def is_routed(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool [R], slots whose row has a route; padding has none."""
    if not trace.num_rows:
        return np.zeros(len(row_of_slot), np.bool_)
    return np.asarray((row_of_slot >= 0) & trace.valid_N[row_of_slot])


def is_faithful(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool [R], tokens before which every row of their sequence has a route; False for padding.

    The first token of a sequence has no row before it. It is nowhere predicted, so that it may count as either.
    """
    missing_before_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(~trace.valid_N)])
    first_N = np.repeat(trace.offsets[:-1], trace.lengths)
    faithful_N = missing_before_N1[:-1] == missing_before_N1[first_N]
    real = row_of_slot >= 0
    if not trace.num_rows:
        return real
    return np.asarray(real & faithful_N[row_of_slot])


def refuse_missing(trace: RoutingTrace, row_of_slot: NDArray[np.int64], what: str = "route") -> None:
    """Raise unless every token of the batch is faithful. `what` is missing otherwise.

    Raises:
        BatchMismatchError: naming the first row that is missing.
    """
    tainted = (row_of_slot >= 0) & ~is_faithful(trace, row_of_slot)
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
