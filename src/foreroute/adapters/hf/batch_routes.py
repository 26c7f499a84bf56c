"""Which rows of a trace a batch of a Hugging Face model takes, found on the host or on the device of the batch."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.forward_args import ForwardTokens, Written
from foreroute.core.passes import LateChecks
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, locate_rows
from foreroute.replay import (
    PassRoutes,
    Policy,
    ReplayRows,
    faithful_rows,
    refuse_missing,
    to_device,
)
from foreroute.trace import INDEXER, RoutingTrace

if TYPE_CHECKING:
    from foreroute.adapters.hf.indexers import FoundIndexers


class BatchRoutes:
    """The routes of a trace, found for each batch by its tokens.

    Args:
        trace: of the sequences of the batch, in order.
        layout: where they are in it, or None to see it from the batch.
        policy: how to replay.
        indexers: of the model, if it has any.
    """

    def __init__(
        self, trace: RoutingTrace, layout: Layout | None, policy: Policy, indexers: FoundIndexers | None = None
    ) -> None:
        if layout is not None:
            _require_whole(layout, trace)
        self._trace = trace
        self._layout = layout
        self._policy = policy
        self._indexers = indexers
        self._checks = LateChecks()
        self._made: tuple[Written, PassRoutes] | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """See `foreroute.replay.Routes`."""
        return self._trace.versions

    def of_pass(self, chunk: int, batch: ForwardTokens) -> PassRoutes:
        """Those of a pass that begins. See `foreroute.replay.Routes`.

        Where the batch is on a GPU, it is compared with the trace there, and rows that were made are used again for
        tensors that nobody has written to since.
        """
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        on_host, given, made, choices = batch.device.type == "cpu", None, self._made, None
        if not on_host:
            given = batch.written
            if given and made and all(a is b and n == m for (a, n), (b, m) in zip(given, made[0], strict=True)):
                return made[1]
        if on_host or self._needs_host(batch):
            row_of_slot = self._located(batch)
            if self._indexers is not None and INDEXER in self._trace.streams:
                all_wanted = self._policy.missing == "error"
                choices = self._indexers.rows(self._trace, row_of_slot, batch.shape[1], all_wanted=all_wanted)
            row_R = to_device(row_of_slot, batch.device)
        else:
            row_R = self._located_there(batch)
        rows = ReplayRows.gather(self._trace, row_R, self._policy, choices)
        found = PassRoutes(rows, lambda: rows.counted_R.view(batch.shape).clone(), rows.drops)
        self._made = (given, found) if given else None
        return found

    def close(self) -> None:
        """Waits for the device where batches were compared there. See `foreroute.replay.Routes`."""
        self._checks.close()

    def _located(self, batch: ForwardTokens) -> NDArray[np.int64]:
        """int64 [R], found on the host, which waits for the batch. Whatever is wrong with it is refused."""
        rows = locate_rows(self._trace, *batch.host[:3])
        if self._layout is not None and not np.array_equal(rows, self._layout.rows().row_of_slot_R):
            raise BatchMismatchError(
                f"the layout has the sequences elsewhere than the batch of shape {list(batch.shape)}; lay them out as "
                "the batch is padded or packed, or leave the layout out"
            )
        if self._policy.missing == "error":
            refuse_missing(self._trace, rows)
        return rows

    @cached_property
    def _faithful_N(self) -> NDArray[np.bool_]:
        return faithful_rows(self._trace)

    def _needs_host(self, batch: ForwardTokens) -> bool:
        """Whether rows are to be found on the host: for indexers, and where it is plain that something is wrong."""
        trace, layout, is_wanted = self._trace, self._layout, self._policy.missing == "error"
        return (
            not trace.num_rows
            or (self._indexers is not None and INDEXER in trace.streams)
            or not batch.may_hold(len(trace))
            or (layout is not None and layout.num_slots != batch.num_slots)
            or (is_wanted and bool((trace.valid_N & ~self._faithful_N).any()))
        )

    def _located_there(self, batch: ForwardTokens) -> Tensor:
        """int64 [R], found on the device: as `_located`, which is asked what is wrong when the device has said so."""
        trace, device = self._trace, batch.device
        there = partial(to_device, device=device)
        tokens_R, kept_R, starts_R, number_R, wrong = batch.sequences_there(len(trace))
        count_R, begins_S1 = kept_R.cumsum(0), there(trace.offsets)
        # as many rows after the first of its sequence as tokens were kept since
        row_R = begins_S1[number_R] + count_R - torch.where(starts_R, count_R, 0).cummax(0).values
        within_R = kept_R & (row_R < begins_S1[number_R + 1])
        row_R = torch.where(within_R, row_R, -1)
        routed_R = within_R if trace.valid_N.all() else within_R & there(trace.valid_N)[row_R]
        wrong += [
            (within_R != kept_R).any(),
            (within_R & (there(trace.token_ids_N)[row_R] != tokens_R)).any(),
            routed_R.sum() != int(trace.valid_N.sum()),  # rows with a route that the batch leaves out
        ]
        if self._layout is not None:
            wrong.append((row_R != there(self._layout.rows().row_of_slot_R)).any())
        if self._policy.missing == "error" and not self._faithful_N.all():
            wrong.append((within_R & ~there(self._faithful_N)[row_R]).any())
        self._checks.add(torch.stack(wrong).any(), partial(self._located, batch.kept()))
        return row_R


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
