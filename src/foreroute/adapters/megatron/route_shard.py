"""The routes of one micro-batch as one rank needs them: a trace cut to its rows and layers, and where they are.

Letters: R rows that routers of this rank see, X rows beside them on other ranks, C rows that the model is handed on it
before sequence parallelism cuts them, N rows of the cut trace, L layers of this rank, K picks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.forward_args import Call, Share, find_layout
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.errors import BatchMismatchError
from foreroute.layout import Layout
from foreroute.replay.rows import (
    NATIVE,
    SPREAD,
    PaddingRows,
    PlacedRows,
    Policy,
    ReplayRows,
    TraceOnDevice,
    faithful_rows,
    refuse_missing,
    spread_picks,
    to_host,
)
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

CutMissing = Literal["error", "native", "drop", "spread"]
"""`MissingRows`; or, for rows that no token of the loss depends on, spread as padding is."""
# What a shard was cut by is in its rows: padding that is spread says so in `row_R`, and so do rows that are filled.
AS_CUT = Policy("native", "native", "native", telemetry=False)
AS_CUT_DROPPING = Policy("drop", "native", "native", telemetry=False)


@dataclass(frozen=True, eq=False, repr=False)
class RouteShard:
    """Routes of one micro-batch, cut to the rows and layers of this rank. Made by `RoutedMegatron.shard`.

    What waits in a queue for its micro-batch waits in this form, on the host: per row L · K bytes (twice that above 256
    experts) and 13 more, two more still where tokens are taken out of the loss. What passes need of it on their device
    is moved there by the first, and stays for later ones as long as the shard lives.
    """

    spec: RoutingSpec  # of the whole model
    layers: tuple[RoutedLayer, ...]  # of this rank
    versions: tuple[int, ...]  # weight versions of the micro-batch, ascending
    missing: CutMissing  # what was done with rows that have no route
    padding: PaddingRows
    trace: RoutingTrace  # N rows of this rank as one sequence without tokens, of its layers; of all if it has none
    row_R: NDArray[np.int32]  # as `TraceOnDevice.gather` takes them, every spread pick named
    faithful_N: NDArray[np.bool_] | None  # where tokens are taken out of the loss
    picks_PLK: NDArray[Any]  # for padding that is spread; behind them what is replayed in `beside_X`
    packed_N: NDArray[np.int32]  # which rows of the micro-batch the N are, ascending
    beside_X: NDArray[np.int32]  # those beside them that only other ranks see, ascending
    offsets: NDArray[np.int64]  # [S + 1], of the sequences of the micro-batch
    is_padded: bool  # whether any rank sees padding in this micro-batch
    tokens_C: NDArray[np.int32]  # in the order of the routers; -1 for padding
    dropped_C: NDArray[np.bool_] | None  # tokens that are taken out of the loss; None where there are none
    _there: dict[torch.device, TraceOnDevice] = field(default_factory=dict, init=False)

    @cached_property
    def is_whole(self) -> bool:
        """Say whether every row, padding too, has a route here, so that nothing is left to the model's routers."""
        num_routed = int(self.trace.valid_N.sum() + (self.row_R <= SPREAD).sum()) if self.layers else 0
        return num_routed == len(self.row_R)

    @cached_property
    def counts_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of the rows that have a route, padding that is spread among them."""
        num_experts, picks_PLK = self.spec.num_experts, self.picks_PLK
        times_P = np.bincount(SPREAD - self.row_R[self.row_R <= SPREAD], minlength=len(picks_PLK))
        counts_LE = np.zeros((len(self.layers), num_experts), np.int64)
        for layer, counts_E in enumerate(counts_LE):
            counts_E += np.bincount(self.trace.expert_ids_NLK[self.trace.valid_N, layer].ravel(), minlength=num_experts)
            np.add.at(counts_E, picks_PLK[:, layer], times_P[:, None])
        return counts_LE

    def of_pass(self, chunk: int, call: Call, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Compare the tokens, and gather the chunk's rows on its device, which is not waited for. See `Routes`."""
        hooks = call.hooks
        _require_no_cache(call)
        rows = self.rows(hooks.layers, call.device)
        execution = None if hooks.holder is None else hooks.holder.execution
        cells = execution.begin_pass(chunk, self, rows) if execution is not None and hooks.layers else None
        if call.input_ids is not None:
            self._compare_tokens(call.input_ids, call.padding_mask, checks)
        # losses that count tokens over all ranks leave padding out even where no rank has any
        is_masked = hooks.counts_all_ranks or self.is_padded
        return replace(
            rows,
            counts=policy.counts,
            padding_R=~rows.real_R if is_masked else None,
            cells=cells,
            loss_mask=partial(self._loss_mask, call),
            drops=bool(hooks.trunk.post_process) and self.dropped_C is not None,
            placed=partial(self._placed, hooks.layers, call.device),
        )

    def rows(self, layers: Sequence[RoutedLayer], device: torch.device) -> ReplayRows:
        """Gather the rows of layers that follow each other here, if any, on the device."""
        there, policy = self._on_device(device), AS_CUT_DROPPING if self.missing == "drop" else AS_CUT
        row_R = there.upload("rows", self.row_R)
        return there.gather(row_R, policy, layers=self._slice_of(layers), is_complete=self.is_whole)

    def _slice_of(self, layers: Sequence[RoutedLayer]) -> slice:
        first = self.layers.index(layers[0]) if layers else 0
        return slice(first, first + len(layers))

    def _placed(self, layers: Sequence[RoutedLayer], device: torch.device) -> PlacedRows:
        """Give the place of each row in the micro-batch, and what is replayed beside it, also on another rank."""
        there, num_rows, num_here = self._on_device(device), int(self.offsets[-1]), len(self.packed_N)
        # of each row of the micro-batch, and of none behind them, as `row_R` has it
        num_spread = len(self.picks_PLK) - len(self.beside_X)
        named = np.full(num_rows + 1, NATIVE, np.int32)
        named[self.packed_N] = np.arange(num_here)
        named[self.beside_X] = SPREAD - num_spread - np.arange(len(self.beside_X))
        at_R = np.append(self.packed_N, num_rows)[np.where(self.row_R < 0, num_here, self.row_R)]
        is_first = np.zeros(num_rows + 1, np.bool_)
        is_first[self.offsets] = True
        behind_R = np.minimum(at_R + 1, num_rows)
        before_LRK, after_LRK = (
            there.gather(there.upload(name, row_R), AS_CUT, layers=self._slice_of(layers)).ids_LRK
            for name, row_R in (
                ("before", np.where(is_first[at_R], NATIVE, named[at_R - 1])),
                ("after", np.where(is_first[behind_R], NATIVE, named[behind_R])),
            )
        )
        return PlacedRows(num_rows, there.upload("places", at_R), before_LRK, after_LRK)

    def _on_device(self, device: torch.device) -> TraceOnDevice:
        if device not in self._there:
            self._there[device] = TraceOnDevice(
                self.trace, device, picks_PLK=self.picks_PLK, faithful_N=self.faithful_N
            )
        return self._there[device]

    def _loss_mask(self, call: Call) -> Tensor:
        """Bool [B, T] on the device, tokens that belong in the loss; B is 1 where the stage is given no tokens."""
        real_C = np.asarray(self.tokens_C >= 0)
        counted_C = real_C if self.dropped_C is None else real_C & ~self.dropped_C
        batch = 1 if call.input_ids is None else len(call.input_ids)
        return self._on_device(call.device).upload("counted tokens", counted_C).view(-1, batch).T

    def _compare_tokens(self, tokens: Tensor, mask: Tensor | None, checks: DeferredChecks) -> None:
        """Compare the tokens of a batch [B, T] and its mask of padding. A device tells late what is wrong."""
        if tokens.numel() != len(self.tokens_C):
            raise BatchMismatchError(
                f"the model is given {tokens.numel()} rows on this rank and the layout has {len(self.tokens_C)}; lay "
                "the routes out as the batch is padded or packed"
            )
        # copies, which whoever gave the batch does not overwrite before somebody reads what is wrong with it
        given_C, mask_C = _in_router_order(tokens), None if mask is None else _in_router_order(mask)
        wanted_C = self._on_device(given_C.device).upload("tokens", self.tokens_C)
        if mask_C is not None:
            wrong_C = torch.where(mask_C, wanted_C >= 0, given_C != wanted_C)
        elif self._first_padding is None:
            wrong_C = given_C != wanted_C
        else:  # without a mask, padding must hold one token throughout
            wrong_C = given_C != torch.where(wanted_C < 0, given_C[self._first_padding], wanted_C)
        checks.add(wrong_C.any(), partial(self._raise_other_tokens, given_C, mask_C))

    def _raise_other_tokens(self, given_C: Tensor, mask_C: Tensor | None) -> None:
        """Raise `BatchMismatchError` for the first token that differs, or that one side alone takes for padding."""
        tokens_C, is_pad_C = to_host(given_C), self.tokens_C < 0
        # without a mask, padding holds one token, which others may have too
        seen_C = is_pad_C & (tokens_C == tokens_C[self._first_padding or 0]) if mask_C is None else to_host(mask_C)
        wrong_C = (seen_C != is_pad_C) | ~is_pad_C & (tokens_C != self.tokens_C)
        row = int(wrong_C.argmax())
        batch = "padding" if seen_C[row] else f"token {int(tokens_C[row])}"
        trace = "padding" if is_pad_C[row] else f"token {int(self.tokens_C[row])}"
        raise BatchMismatchError(
            f"row {row} of this rank (sequence first) is {batch} in the batch and {trace} in the trace; "
            f"{int(wrong_C.sum())} of {len(tokens_C)} rows differ. Replay whole sequences of this micro-batch, in "
            'order; where it is padded on the left, give layout=pad(trace.lengths, side="left", order="sbhd", to=...); '
            "where padding is no single token, pass padding_mask"
        )

    @cached_property
    def _first_padding(self) -> int | None:
        is_pad_C = self.tokens_C < 0
        return int(is_pad_C.argmax()) if is_pad_C.any() else None


class UncutRoutes:
    """The routes of a session whose first forward says how they lie; from then on, the shard that is cut by it."""

    def __init__(self, trace: RoutingTrace, cut: Callable[[Layout], RouteShard]) -> None:
        self.versions = trace.versions
        self._trace, self._cut = trace, cut
        self._shard: RouteShard | None = None

    def of_pass(self, chunk: int, call: Call, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        if self._shard is None:
            _require_no_cache(call)
            self._shard = self._cut(find_layout(self._trace, call, checks))
        return self._shard.of_pass(chunk, call, policy, checks)


def shard(
    trace: RoutingTrace,
    layout: Layout,
    share: Share,
    layers: Sequence[RoutedLayer],
    home_LE: NDArray[np.integer],
    *,
    missing: CutMissing = "error",
    padding: PaddingRows = "spread",
) -> RouteShard:
    """Cut a trace to what one rank replays: its layers, of which there may be none, and the rows of its share.

    The rank of each expert of these layers is `home_LE`, integers [L, E]. The rest is as in `RoutedMegatron.shard`.
    """
    trace.spec.require_alike("a layout of ranks")
    whole_rows, row_R = layout.rows(), share.of_routers(layout).rows().packed_row_R
    context_C = share.of_context(layout).rows().packed_row_R
    if missing == "error":
        refuse_missing(trace, whole_rows.packed_row_R)
    # The rows of a rank become one sequence: what lies before them, on other ranks, is known to `faithful_N` alone.
    seen_N = np.unique(row_R[row_R >= 0]) if layers else np.zeros(0, np.int64)
    of_layers = trace.without_streams()
    of_layers = of_layers.select_layers(layers) if layers else of_layers
    cut = of_layers.take_rows(seen_N, np.array([len(seen_N)]))
    # batches are compared with `tokens_C`, and versions with those of the whole: one number in the place of either
    nothing_N = np.broadcast_to(np.int32(0), len(seen_N))
    cut = replace(cut, token_ids_N=nothing_N, weight_versions_N=nothing_N)
    spec, picks_PLK = cut.spec, cut.expert_ids_NLK[:0]
    beside_X = seen_N[:0]
    here_R = np.full(len(row_R), NATIVE, np.int32)
    if layers:
        here_R[row_R >= 0] = np.searchsorted(seen_N, row_R[row_R >= 0])
        is_spread_R = (row_R < 0) & (padding == "spread")
        if missing == "spread":
            is_spread_R[row_R >= 0] = ~trace.valid_N[row_R[row_R >= 0]]
        picks_PLK = spread_picks(spec, home_LE, share.number * spec.top_k)  # ranks begin with other experts
        here_R[is_spread_R] = SPREAD - np.arange(is_spread_R.sum()) % len(picks_PLK)
        # the sentinel asks for rows beside those that are seen here
        is_first_N = np.zeros(trace.num_rows + 1, np.bool_)
        is_first_N[trace.offsets] = True
        beside_X = np.union1d(seen_N[~is_first_N[seen_N]] - 1, seen_N[~is_first_N[seen_N + 1]] + 1)
        beside_X = np.setdiff1d(beside_X[trace.valid_N[beside_X]], seen_N)
        picks_PLK = np.concatenate([picks_PLK, of_layers.expert_ids_NLK[beside_X]])
    faithful_N = dropped_C = None
    if missing == "drop":
        faithful_N, dropped_C = faithful_rows(trace), context_C >= 0
        dropped_C[dropped_C] = ~faithful_N[context_C[dropped_C]]
    return RouteShard(
        trace.spec,
        tuple(layers),
        trace.versions,
        missing,
        padding,
        cut,
        here_R,
        None if faithful_N is None else faithful_N[seen_N],
        picks_PLK,
        seen_N.astype(np.int32),
        beside_X.astype(np.int32),
        trace.offsets,
        is_padded=bool(whole_rows.is_pad_R.any() or (missing == "spread" and not trace.valid_N.all())),
        tokens_C=np.append(trace.token_ids_N, np.int32(-1))[context_C],  # padding is row -1
        dropped_C=dropped_C if dropped_C is not None and dropped_C.any() else None,
    )


def _require_no_cache(call: Call) -> None:
    if call.inference is not None:
        raise BatchMismatchError(
            "the forward runs with an inference context; replay whole sequences, without a key-value cache"
        )


def _in_router_order(of_tokens: Tensor) -> Tensor:
    """Copy [B, T] as [C]: sequence first."""
    return of_tokens.T.clone(memory_format=torch.contiguous_format).view(-1)
