"""Which rows of a trace a forward of a Hugging Face model takes.

Rows are found on the device of the batch, where its tokens are compared with the trace's. The host finds them where it
must, and says what is wrong where they do not belong together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.forward_tokens import ForwardTokens
from foreroute.adapters.hf.pixels import digests_of, refuse_other_pixels
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.tensor_ids import TensorIds
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, locate_rows
from foreroute.replay import PassRoutes, Policy, TraceOnDevice
from foreroute.replay.rows import faithful_rows, refuse_missing, to_device
from foreroute.trace import INDEXER, PIXELS, RoutingTrace
from foreroute.trace.operations import add_assignments

if TYPE_CHECKING:
    from foreroute.adapters.hf.model import TransformerHooks


class TraceRows:
    """A trace whose rows are found for each batch by its tokens, in as many sessions as there are.

    Made by `RoutedTransformer.rows`, it keeps on the device what batches take, so that recompute, update and every
    epoch on the same micro-batch move nothing there again.

    Args:
        trace: of the sequences of the batch, in order. Nobody may write to its arrays from now on.
        layout: where they are in it, or None to see it from the batch.
        hooks: of the model.
    """

    def __init__(self, trace: RoutingTrace, layout: Layout | None, hooks: TransformerHooks) -> None:
        if layout is not None:
            _require_whole(layout, trace)
        self.trace = trace
        self.layout = layout
        self._hooks = hooks
        self._indexers = hooks.found_indexers
        self._there: TraceOnDevice | None = None
        self._made: MadeRows | None = None
        self._counts: dict[tuple[int, int], NDArray[np.int64]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """See `foreroute.replay.Routes`."""
        return self.trace.versions

    def counts_of(self, part: int = 0, num_parts: int = 1) -> NDArray[np.int64]:
        """int64 [L, E], assignments of the rows that have a route, of which a batch leaves none out.

        Args:
            part: of these rows, when they are cut as `torch.chunk` cuts them.
            num_parts: how many ranks share the batch, each of which sends its part.
        """
        if (part, num_parts) not in self._counts:
            trace, spec = self.trace, self.trace.spec
            if num_parts > 1:
                routed = np.flatnonzero(trace.valid_N)
                each = -(-len(routed) // num_parts)
                valid_N = np.zeros_like(trace.valid_N)
                valid_N[routed[part * each : (part + 1) * each]] = True
                trace = replace(trace, valid_N=valid_N)
            all_S = np.zeros(len(trace), np.int64)
            counts_MLGE = np.zeros((1, spec.num_layers, 1, spec.num_experts), np.int32)
            add_assignments(trace, all_S, all_S, counts_MLGE)
            self._counts[part, num_parts] = counts_MLGE[0, :, 0].astype(np.int64)
        return self._counts[part, num_parts]

    @property
    def is_whole(self) -> bool:
        """Whether no row is missing but the last of a sequence."""
        return bool(faithful_rows(self.trace).all())

    def of_pass(self, chunk: int, batch: ForwardTokens, policy: Policy, checks: DeferredChecks) -> PassRoutes:
        """What a batch replays. See `foreroute.replay.Routes`.

        That of the last batch is used again for tensors to which nobody has written since.
        """
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        policy = replace(policy, telemetry=False)  # which no row depends on
        made = self._made
        if made is None or not made.are_of(batch, policy):
            made = self._made = self._make(batch, policy)
        if made.wrong is not None:
            checks.add(made.wrong, partial(self.located, made.batch, policy))
        execution = self._hooks.execution
        if execution is None:
            return made.routes
        assert made.routes.rows is not None, "every model has a router"
        return made.routes._replace(rows=replace(made.routes.rows, cells=execution.begin_pass(0, self.trace)))

    def _make(self, batch: ForwardTokens, policy: Policy) -> MadeRows:
        there = self._there
        if there is None or there.device != batch.device:
            there = self._there = TraceOnDevice(self.trace, batch.device)
        choices = wrong = None
        # on the CPU a batch that is wrong is told before anybody can overwrite it
        given = batch.given | batch.pixels
        kept = batch if batch.device.type == "cpu" else batch.kept()
        if self._needs_host(batch, there, policy):
            row_of_slot = self.located(batch, policy)
            if self._indexers is not None and INDEXER in self.trace.streams:
                all_wanted = policy.missing == "error"
                choices = self._indexers.rows(self.trace, row_of_slot, batch.shape[1], all_wanted=all_wanted)
            row_R = to_device(row_of_slot, batch.device)
        else:
            row_R, wrong = self._located_there(batch, there, policy)
        rows = there.gather(row_R, policy, choices)
        routes = PassRoutes(rows, lambda: rows.counted_R.view(batch.shape).clone(), rows.drops)
        return MadeRows(kept, list(given), TensorIds(given.values()), policy, routes, wrong)

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
        if PIXELS in self.trace.streams and batch.host.digests_BT is not None:
            refuse_other_pixels(self.trace, rows, batch.host.digests_BT.reshape(-1))
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
        if PIXELS in trace.streams and batch.digests_BT is not None:
            known_R = there.kept("digests", digests_of(trace))[row_R]
            wrong.append((within_R & (known_R >= 0) & (known_R != batch.digests_BT.view(-1))).any())
        return row_R, torch.stack(wrong).any()


class MadeRows(NamedTuple):
    """What one batch replays, to be used again.

    Attributes:
        batch: to be read where something is wrong with it.
        names: of the tensors that it was given.
        given: what they were.
        policy: how to replay.
        routes: that it replays.
        wrong: bool [], whether they are those of another batch; None where the host has compared them.
    """

    batch: ForwardTokens
    names: list[str]
    given: TensorIds
    policy: Policy
    routes: PassRoutes
    wrong: Tensor | None

    def are_of(self, batch: ForwardTokens, policy: Policy) -> bool:
        """Whether a batch is the very same, as far as can be said without asking the device."""
        given = batch.given | batch.pixels
        tensors = list(given.values())
        # in inference mode nobody counts how often they are written to
        is_counted = not any(tensor.is_inference() for tensor in tensors)
        return is_counted and self.policy == policy and self.names == list(given) and self.given.fit(tensors)


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
