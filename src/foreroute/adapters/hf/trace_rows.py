"""Rows of a trace that a forward of a Hugging Face model takes.

Rows are found on the device of the batch, where its tokens are compared with the trace's. The host says what is wrong
where they do not belong together.

Letters: B rows of a batch of T positions, R = B · T, S sequences of a trace, N rows of it, L layers, E experts.
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
from foreroute.adapters.hf.pixels import UNKNOWN, digests_of, refuse_other_pixels
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.tensor_ids import TensorIds
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import Layout, locate_rows
from foreroute.replay import Policy, ReplayRows, TraceOnDevice
from foreroute.replay.arguments import require_layout
from foreroute.replay.coded_sets import CodedChoices
from foreroute.replay.indexers import IndexerRows, find_positions
from foreroute.replay.rows import faithful_rows, refuse_missing, to_host
from foreroute.trace import INDEXER, PIXELS, RoutingTrace
from foreroute.trace.operations import add_assignments

if TYPE_CHECKING:
    from foreroute.adapters.hf.routed_transformer import TransformerHooks


class _LastBatch(NamedTuple):
    """A batch and what it replays, for one that is given by the same tensors."""

    batch: ForwardTokens  # a copy
    names: list[str]  # of the tensors that said what it is
    ids: TensorIds  # of these
    policy: Policy
    rows: ReplayRows
    wrong: Tensor  # bool [], as `TraceRows._locate`


class TraceRows:
    """A trace whose rows are found for each batch by its tokens, in as many sessions as there are.

    Made by `RoutedTransformer.rows`, it keeps on the device what batches take, so that recompute, update and every
    epoch on the same micro-batch move nothing there again.
    """

    def __init__(self, trace: RoutingTrace, layout: Layout | None, hooks: TransformerHooks) -> None:
        if layout is not None:
            require_layout(layout, trace)
            if layout.is_split or layout.order == "sbhd":
                raise LayoutError(
                    f"the layout is {'split' if layout.is_split else 'sequence first'}; a Hugging Face model takes "
                    'whole batches, packed or batch first (pad(..., order="bshd"))'
                )
        self.trace = trace
        self.layout = layout
        self._hooks = hooks
        self._indexers = hooks.found_indexers if INDEXER in trace.streams else None
        # the rows that have all that is replayed: a row without its choices is missing too
        self._decided, self._choices = trace, None
        if self._indexers is not None:
            stream = trace.streams[INDEXER]
            self._decided = replace(trace, valid_N=trace.valid_N & stream.valid_N)
            self._choices = CodedChoices(self._indexers.spec, stream, trace.positions_N)
        self._there: TraceOnDevice | None = None
        self._counts: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._last: _LastBatch | None = None

    @property
    def versions(self) -> tuple[int, ...] | None:
        """Weight versions of the rows that have a route, ascending, for which every row is looked at."""
        return self.trace.versions if len(self.trace) else None

    def counts_of(self, part: int = 0, num_parts: int = 1) -> NDArray[np.int64]:
        """Count int64 [L, E], assignments of rows that have a route, or of one of the parts that ranks cut them in."""
        # a batch leaves none of these rows out, and ranks cut them as `torch.chunk` does
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
        """Say whether no row is missing but the last of a sequence."""
        return bool(faithful_rows(self.trace).all())

    def of_pass(self, chunk: int, batch: ForwardTokens, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Find and gather what a batch replays, or give what the last one did where it is the same."""
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        rows, execution = self._reuse(batch, policy, checks), self._hooks.execution
        if rows is None:
            rows = self._find(batch, policy, checks)
        return rows if execution is None else replace(rows, cells=execution.begin_pass(0, self.trace, rows))

    def _reuse(self, batch: ForwardTokens, policy: Policy, checks: DeferredChecks) -> ReplayRows | None:
        """Give the rows of the last batch, if this one is given by the same tensors and nobody wrote to them."""
        last, given = self._last, batch.given
        if last is None or last.policy != policy or last.names != [*given] or not last.ids.fit([*given.values()]):
            return None
        differs = batch.differs_from(last.batch)  # who writes is not always seen: collectives do not count their writes
        if differs.device.type == "cpu":  # where the host need not wait
            return None if differs.item() else last.rows
        checks.add(last.wrong | differs, partial(self._raise_overwritten, batch, policy))
        return last.rows

    def _find(self, batch: ForwardTokens, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Find and gather them, and remember the batch."""
        there = self._there
        if there is None or there.device != batch.device:
            faithful_N = faithful_rows(self._decided)
            there = self._there = TraceOnDevice(self.trace, batch.device, faithful_N=faithful_N)
        row_R, wrong = self._locate(batch, there, policy)
        choices = None
        if self._indexers is not None and self._choices is not None:
            chosen_R = torch.where(wrong, -1, row_R)  # no row of a batch whose rows are others has a choice
            choices = IndexerRows(self._choices, there, chosen_R, batch.shape[1])
            wrong = wrong | self._indexers.misplaced(choices, row_R, batch.shape[1])
        # on the CPU checks look at once, before anybody overwrites the batch
        checks.add(wrong, partial(self.raise_mismatch, batch if batch.device.type == "cpu" else batch.copied, policy))
        # rows with a route are all in the batch, or a check tells of it
        is_full = policy.padding == "spread" or len(row_R) == self.trace.num_rows
        rows = there.gather(row_R, policy, choices, is_complete=is_full and bool(self.trace.valid_N.all()))
        rows = replace(rows, loss_mask=partial(rows.counted_R.view, batch.shape))
        given = [*batch.given.values()]
        # in inference mode nobody counts writes; what is no tensor may hold others next time
        if given and all(isinstance(each, Tensor) and not each.is_inference() for each in (*given, rows.ids_LRK)):
            self._last = _LastBatch(batch.copied, [*batch.given], TensorIds(given), policy, rows, wrong)
        return rows

    def _raise_overwritten(self, batch: ForwardTokens, policy: Policy) -> None:
        """Raise `BatchMismatchError` for tensors that hold another batch than when its rows were found."""
        self.raise_mismatch(batch, policy)
        raise BatchMismatchError(
            "tensors of the batch were overwritten, without torch's counting it, since their rows were found, and hold "
            "the sequences elsewhere now; give the batch in other tensors, or make the rows anew by routed.rows(trace)"
        )

    def raise_mismatch(self, batch: ForwardTokens, policy: Policy) -> None:
        """Raise `BatchMismatchError` for what is wrong with a batch, which the host waits for."""
        self._last = None  # what is told is found anew when it is given once more
        ids_BT, kept_BT, starts_BT = batch.on_host()
        row_R = locate_rows(self.trace, ids_BT, kept_BT, starts_BT)
        if self.layout is not None and not np.array_equal(row_R, self.layout.rows().packed_row_R):
            raise BatchMismatchError(
                f"the layout has the sequences elsewhere than the batch of shape {list(batch.shape)}; lay them out as "
                "the batch is padded or packed, or leave the layout out"
            )
        if policy.missing == "error":
            refuse_missing(self.trace, row_R)
        if PIXELS in self.trace.streams and batch.digests_BT is not None:
            refuse_other_pixels(self.trace, row_R, to_host(batch.digests_BT).reshape(-1))
        if self._indexers is not None:
            width = batch.shape[1]
            self._indexers.require(*find_positions(self.trace.offsets, row_R, width), width)
            if policy.missing == "error":
                refuse_missing(self._decided, row_R, what="choice of indexers")

    def _locate(self, batch: ForwardTokens, there: TraceOnDevice, policy: Policy) -> tuple[Tensor, Tensor]:
        """Find int64 [R], the row of each position or -1, and bool [], whether `raise_mismatch` would raise."""
        trace, is_error, faithful_N = self.trace, policy.missing == "error", there.faithful_N
        if (
            (not batch.may_be_packed and len(trace.offsets) - 1 not in (0, batch.shape[0]))
            or (self.layout is not None and self.layout.num_router_rows != batch.num_router_rows)
            or (is_error and bool((trace.valid_N & ~faithful_N).any()))  # a row with a route must be in the batch
        ):  # shapes and trace say that it is wrong, whatever the batch holds
            self.raise_mismatch(batch, policy)
        kept_BT, starts_BT, wrongs = batch.find_sequences()
        # no sequence ends before the row behind the last one of a trace of none
        offsets, num_sequences = trace.offsets, len(trace.offsets) - 1
        begins_S = there.upload("begins", offsets[: max(1, num_sequences)])
        ends_S = there.upload("ends", offsets[min(1, num_sequences) :])
        if starts_BT is None:  # a row of the batch holds one sequence
            row_BT, end_BT = kept_BT.cumsum(1) + (begins_S - 1)[:, None], ends_S[:, None]
        else:
            number_BT, row_BT, is_other = self._number(kept_BT, starts_BT, begins_S)
            end_BT = ends_S[number_BT]
            wrongs += [is_other] if num_sequences else []  # padding alone fits a trace of none
        row_BT = torch.where(kept_BT & (row_BT < end_BT), row_BT, -1)  # which is behind the last row of what is there
        nothing, no_token = np.zeros(1, np.bool_), np.full(1, np.iinfo(np.int32).min, np.int32)
        tokens_BT = there.upload("tokens", trace.token_ids_N, no_token)[row_BT]
        num_routed = there.upload("valid", trace.valid_N, nothing)[row_BT].sum()
        wrongs += [
            (kept_BT & (tokens_BT != batch.input_ids)).any(),  # no token is what a sequence does not have
            num_routed != int(trace.valid_N.sum()),  # rows with a route that the batch leaves out
        ]
        row_R = row_BT.view(-1)
        if self.layout is not None:
            wrongs.append((row_R != there.upload("layout", self.layout.rows().packed_row_R)).any())
        if is_error and not faithful_N.all():
            wrongs.append(((row_R >= 0) & ~there.upload("faithful", faithful_N, nothing)[row_R]).any())
        if PIXELS in trace.streams and batch.digests_BT is not None:
            known_BT = there.upload("digests", digests_of(trace), np.full(1, UNKNOWN))[row_BT]
            wrongs.append(((known_BT >= 0) & (known_BT != batch.digests_BT)).any())
        return row_R, torch.stack(wrongs).any()

    def _number(self, kept_BT: Tensor, starts_BT: Tensor, begins_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number sequences and rows of the trace of kept positions, int64 [B, T]; say whether sequences are others."""
        # only the device knows how many sequences there are, and whether rows of the batch hold several
        (rows, width), starts_R = kept_BT.shape, starts_BT.reshape(-1)
        are_packed = (starts_BT.sum(1) > 1).any()
        row_of_R = torch.arange(rows * width, device=kept_BT.device) // width
        number_R = torch.where(are_packed, starts_R.cumsum(0) - 1, row_of_R).clamp(0, len(begins_S) - 1)
        # A token is as many rows behind the first of its sequence as tokens were kept since that one; the number of
        # kept tokens grows along the batch, so that its running maximum over first tokens is that of the last of them.
        count_R = kept_BT.reshape(-1).cumsum(0)
        row_R = begins_S[number_R] + count_R - torch.where(starts_R, count_R, 0).cummax(0).values
        is_other = torch.where(are_packed, starts_R.sum(), rows) != len(self.trace.offsets) - 1
        return number_R.view_as(kept_BT), row_R.view_as(kept_BT), is_other
