"""One replay session: which routes each pass gets, and what is known about it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.call import Call, find_layout, require_fits
from foreroute.adapters.megatron.passes import Listener, Orders
from foreroute.adapters.megatron.placing import PaddingRows, PlacedRoutes
from foreroute.adapters.megatron.ranks import Share
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout import Layout
from foreroute.mismatch import LOG10_EDGES, LiveAgreement
from foreroute.replay import (
    AgreementSums,
    Counts,
    MissingRows,
    PassNotes,
    ReplayRows,
    Watch,
    count_experts,
    require_effect,
    required,
)
from foreroute.trace import RoutingSpec, RoutingTrace

Noted = TypeVar("Noted")


@dataclass(frozen=True)
class Policy:
    """How to replay.

    Attributes:
        missing: what to do with rows that have no route.
        padding: who picks for padding.
        counts: which selection auxiliary losses and expert-bias counters count.
        telemetry: whether routers also select by themselves, for the agreement.
    """

    missing: MissingRows = "error"
    padding: PaddingRows = "spread"
    counts: Counts = "native"
    telemetry: bool = False

    @property
    def watch(self) -> Watch:
        """What its passes note."""
        return Watch(ids=self.telemetry and self.counts == "replayed", own=self.telemetry)


class Telemetry:
    """Sums of one chunk over passes, on the device until asked for.

    Args:
        spec: of the chunk.
    """

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self._sums = AgreementSums(LOG10_EDGES)
        self._counts_LE: Tensor | None = None

    def add(self, notes: PassNotes, rows: ReplayRows, counts: Counts) -> None:
        """Add one pass; padding that replay picks for is no route."""
        self._sums.add(notes, replace(rows, routed_R=rows.routed_R & rows.real_R))
        counted = required(notes.ids_LRK if counts == "replayed" else notes.own_ids_LRK)
        counts_LE = count_experts(counted, rows.real_R, self._spec.num_experts)
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    def agreement(self) -> LiveAgreement | None:
        """None before the first pass. Waits for the device."""
        sums = self._sums.to_host()
        return LiveAgreement.from_sums(sums, self._spec.top_k) if sums else None

    @property
    def counts_LE(self) -> NDArray[np.int64] | None:
        """int64 [L, E], or None before the first pass. Waits for the device."""
        return None if self._counts_LE is None else np.asarray(self._counts_LE.cpu().numpy())


class ReplaySession(Listener):
    """What `RoutedModel.replay` yields.

    Args:
        routes: of the micro-batch.
        layout: where they are, or None to see it from the batch.
        place: cuts a trace to this rank.
        share: of this rank.
        specs: of each chunk; None of one without routers.
        with_loss: the chunks whose output the loss is made of, where the mask of dropped tokens is wanted.
        policy: how to replay.
        telemetry: where to add up what routers do, by chunk.

    Attributes:
        num_forwards: completed so far, those of each chunk counted.
    """

    def __init__(
        self,
        routes: RoutingTrace | PlacedRoutes,
        layout: Layout | None,
        place: Callable[[RoutingTrace, Layout], PlacedRoutes],
        share: Share,
        specs: list[RoutingSpec | None],
        with_loss: frozenset[int],
        policy: Policy,
        telemetry: dict[int, Telemetry],
    ) -> None:
        self.num_forwards = 0
        self.watch = policy.watch
        self._routes = routes
        self._layout = layout
        self._place = place
        self._share = share
        self._specs = specs
        self._with_loss = with_loss
        self._policy = policy
        self._telemetry = telemetry
        self._placed = routes if isinstance(routes, PlacedRoutes) else None
        self._rows: ReplayRows | None = None
        self._loss_mask_BT: Tensor | None = None
        self._mask_was_read = False
        self._owes_mask = False

    def begin(self, chunk: int, call: Call, device: torch.device) -> Orders | None:
        """Place the routes, compare the tokens, and move the chunk's part to the device."""
        if call.inference is not None:
            raise BatchMismatchError(
                "the forward runs with an inference context; replay whole sequences, without a key-value cache"
            )
        placed = self._placed_for(call)
        require_fits(call, placed)
        self._loss_mask_BT = _in_batch_order(placed.counted_C, call, device)
        spec = self._specs[chunk]
        self._owes_mask = self._owes_mask or (placed.dropped_C is not None and chunk in self._with_loss)
        if spec is None:
            self.num_forwards += 1
            return None
        self._rows = placed.rows(spec.layers, device)
        return Orders(self._rows, placed.is_padded, self._policy.counts)

    def _placed_for(self, call: Call) -> PlacedRoutes:
        if self._placed is None:
            assert isinstance(self._routes, RoutingTrace), "routes that are not placed are a trace"
            layout = find_layout(self._routes, call, self._share) if self._layout is None else self._layout
            self._placed = self._place(self._routes, layout)
        return self._placed

    def end(self, chunk: int, call: Call, notes: PassNotes) -> None:
        """Add up the telemetry, on the device."""
        self.num_forwards += 1
        if self._policy.telemetry and self._rows is not None:
            spec = self._specs[chunk]
            assert spec is not None, "a chunk without routers has no notes"
            self._telemetry.setdefault(chunk, Telemetry(spec)).add(notes, self._rows, self._policy.counts)

    def close(self) -> None:
        """Called when the session ends without an error.

        Raises:
            ReplayError: when it was a session in name only.
        """
        require_effect(self.num_forwards, owes_mask=self._owes_mask and not self._mask_was_read)

    @property
    def loss_mask_BT(self) -> Tensor:
        """Bool [B, T] on the device: tokens of the last forward that belong in the loss, in the place of each token.

        T counts the positions that the model is given on this context-parallel rank. Padding is False. Under
        `missing="drop"` so is a token with a row before it, in its sequence, that was not replayed.

        Raises:
            ReplayError: before the first forward.
        """
        if self._loss_mask_BT is None:
            raise ReplayError("there is no loss mask before the first forward of a session")
        self._mask_was_read = True
        return self._loss_mask_BT

    def agreement(self, chunk: int = 0) -> LiveAgreement:
        """The model's own selections beside the replayed ones, over all forwards of one chunk of this rank so far.

        Rows and layers are those of this rank; join ranks that share rows with `+`. Recomputation is not counted again.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        kept = self._telemetry.get(chunk)
        found = None if kept is None else kept.agreement()
        return noted(found)

    def expert_counts_LE(self, chunk: int = 0) -> NDArray[np.int64]:
        """int64 [L, E], tokens of this rank that each expert was picked for, by the session's `counts`; no padding.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        kept = self._telemetry.get(chunk)
        return noted(None if kept is None else kept.counts_LE)


def noted(found: Noted | None) -> Noted:
    """What was noted. Raises `ReplayError` if nothing was."""
    if found is None:
        raise ReplayError("no telemetry: replay with telemetry=True and run a forward")
    return found


def _in_batch_order(mask_C: NDArray[np.bool_], call: Call, device: torch.device) -> Tensor:
    """[B, T] of what is in the order of the routers; [1, C] where the stage is given no tokens."""
    batch = 1 if call.input_ids is None else call.input_ids.shape[0]
    return torch.from_numpy(mask_C).to(device).view(-1, batch).T
