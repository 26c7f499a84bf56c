"""Which rows of a trace a batch of a Hugging Face model takes, found on the host or on the device of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.forward_args import ForwardTokens, HostBatch, Written
from foreroute.core.passes import LateChecks
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, locate_rows
from foreroute.replay import PassRoutes, Policy, TraceOnDevice, refuse_missing, to_device
from foreroute.trace import INDEXER, RoutingTrace

if TYPE_CHECKING:
    from foreroute.adapters.hf.indexers import FoundIndexers


class TraceRows:
    """A trace whose rows are found for each batch by its tokens, in as many sessions as there are.

    Made by `RoutedTransformer.rows`, it keeps on the device what batches take, so that recompute, update and every
    epoch on the same micro-batch move nothing there again.

    Args:
        trace: of the sequences of the batch, in order. Nobody may write to its arrays from now on.
        layout: where they are in it, or None to see it from the batch.
        indexers: of the model, if it has any.
    """

    def __init__(self, trace: RoutingTrace, layout: Layout | None, indexers: FoundIndexers | None) -> None:
        if layout is not None:
            _require_whole(layout, trace)
        self.trace = trace
        self.layout = layout
        self._indexers = indexers
        self._there: TraceOnDevice | None = None
        self._made: tuple[HostBatch | Written, Policy, PassRoutes, Callable[[LateChecks], None]] | None = None

    def of_batch(self, batch: ForwardTokens, policy: Policy, checks: LateChecks) -> PassRoutes:
        """What a batch replays. As `foreroute.replay.Routes.of_pass`.

        That of the last batch is used again: on the CPU for an equal one, on a GPU for tensors to which nobody has
        written since.

        Args:
            batch: compared with the trace, on the device where it is on one.
            policy: how to replay.
            checks: of the session, told what the device finds.
        """
        given = batch.host if batch.device.type == "cpu" else batch.written
        policy = replace(policy, telemetry=False)  # which no row depends on
        if self._made is not None:
            known, how, made, ask = self._made
            if how == policy and _are_same(known, given):
                ask(checks)
                return made
        there = self._there
        if there is None or there.device != batch.device:
            there = self._there = TraceOnDevice(self.trace, batch.device)
        choices, ask = None, _ask_nothing
        if batch.device.type == "cpu" or self._needs_host(batch, there, policy):
            row_of_slot = self.located(batch, policy)
            if self._indexers is not None and INDEXER in self.trace.streams:
                all_wanted = policy.missing == "error"
                choices = self._indexers.rows(self.trace, row_of_slot, batch.shape[1], all_wanted=all_wanted)
            row_R = to_device(row_of_slot, batch.device)
        else:
            row_R, wrong = self._located_there(batch, there, policy)
            ask = partial(LateChecks.add, wrong=wrong, tell=partial(self.located, batch.kept(), policy))
        ask(checks)
        rows = there.gather(row_R, policy, choices)
        made = PassRoutes(rows, lambda: rows.counted_R.view(batch.shape).clone(), rows.drops)
        self._made = given, policy, made, ask
        return made

    def located(self, batch: ForwardTokens, policy: Policy) -> NDArray[np.int64]:
        """int64 [R], found on the host, which waits for the batch. Whatever is wrong with it is refused."""
        rows = locate_rows(self.trace, *batch.host[:3])
        if self.layout is not None and not np.array_equal(rows, self.layout.rows().row_of_slot_R):
            raise BatchMismatchError(
                f"the layout has the sequences elsewhere than the batch of shape {list(batch.shape)}; lay them out as "
                "the batch is padded or packed, or leave the layout out"
            )
        if policy.missing == "error":
            refuse_missing(self.trace, rows)
        return rows

    def _needs_host(self, batch: ForwardTokens, there: TraceOnDevice, policy: Policy) -> bool:
        """Whether rows are to be found on the host: for indexers, and where it is plain that something is wrong."""
        trace, layout = self.trace, self.layout
        return (
            not trace.num_rows
            or (self._indexers is not None and INDEXER in trace.streams)
            or not batch.may_hold(len(trace))
            or (layout is not None and layout.num_slots != batch.num_slots)
            or (policy.missing == "error" and bool((trace.valid_N & ~there.faithful_N).any()))
        )

    def _located_there(self, batch: ForwardTokens, there: TraceOnDevice, policy: Policy) -> tuple[Tensor, Tensor]:
        """int64 [R], found on the device; and bool [], whether `located` would refuse the batch."""
        trace = self.trace
        tokens_R, kept_R, starts_R, number_R, wrong = batch.sequences_there(len(trace))
        count_R, begins_S1 = kept_R.cumsum(0), there.kept("offsets", trace.offsets)
        # as many rows after the first of its sequence as tokens were kept since
        row_R = begins_S1[number_R] + count_R - torch.where(starts_R, count_R, 0).cummax(0).values
        within_R = kept_R & (row_R < begins_S1[number_R + 1])
        row_R = torch.where(within_R, row_R, -1)
        routed_R = within_R if trace.valid_N.all() else within_R & there.kept("valid", trace.valid_N)[row_R]
        wrong += [
            (within_R != kept_R).any(),
            (within_R & (there.kept("tokens", trace.token_ids_N)[row_R] != tokens_R)).any(),
            routed_R.sum() != int(trace.valid_N.sum()),  # rows with a route that the batch leaves out
        ]
        if self.layout is not None:
            wrong.append((row_R != there.kept("layout", self.layout.rows().row_of_slot_R)).any())
        if policy.missing == "error" and not there.faithful_N.all():
            wrong.append((within_R & ~there.kept("faithful", there.faithful_N)[row_R]).any())
        return row_R, torch.stack(wrong).any()


class BatchRoutes:
    """The routes of one session.

    Args:
        found: the trace, and where its rows are.
        policy: how to replay.
    """

    def __init__(self, found: TraceRows, policy: Policy) -> None:
        self._found = found
        self._policy = policy
        self._checks = LateChecks()

    @property
    def versions(self) -> tuple[int, ...]:
        """See `foreroute.replay.Routes`."""
        return self._found.trace.versions

    def of_pass(self, chunk: int, batch: ForwardTokens) -> PassRoutes:
        """Those of a pass that begins. See `foreroute.replay.Routes`."""
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        return self._found.of_batch(batch, self._policy, self._checks)

    def close(self) -> None:
        """Waits for the device where batches were compared there. See `foreroute.replay.Routes`."""
        self._checks.close()


def _are_same(known: HostBatch | Written, given: HostBatch | Written) -> bool:
    """Whether two batches are equal, as far as that can be said without waiting for a device."""
    if isinstance(given, HostBatch):
        return isinstance(known, HostBatch) and known.equals(given)
    if isinstance(known, HostBatch) or not given:  # nobody counts how often they are written to
        return False
    return all(a is b and n == m for (a, n), (b, m) in zip(given, known, strict=True))


def _ask_nothing(_: LateChecks) -> None:
    """Of a batch that was compared on the host."""


def _require_whole(layout: object, trace: RoutingTrace) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
    if layout.is_split or layout.order == "sbhd":
        raise LayoutError(
            f"the layout is {'split' if layout.is_split else 'sequence first'}; a Hugging Face model takes whole "
            'batches, packed or batch first (pad(..., order="bshd"))'
        )
    if layout.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {layout.num_rows} packed rows and the trace has {trace.num_rows}; lay out trace.lengths"
        )
