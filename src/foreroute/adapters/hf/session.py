"""One replay session: which routes each forward gets, and what is known about it afterwards."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.passes import Listener
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout import locate_rows
from foreroute.mismatch import LOG10_EDGES, LiveAgreement
from foreroute.replay import (
    AgreementSums,
    Counts,
    MissingRows,
    PassNotes,
    ReplayRows,
    Watch,
    count_experts,
    is_faithful,
    require_effect,
    required,
    to_device,
)
from foreroute.trace import RoutingTrace


class ReplaySession(Listener):
    """What `RoutedModel.replay` yields.

    Attributes:
        num_forwards: completed so far.
    """

    forces = True

    def __init__(
        self, trace: RoutingTrace, missing: MissingRows, *, telemetry: bool, counts: Counts, gate_weights: bool
    ) -> None:
        self.num_forwards = 0
        self.watch = Watch(ids=counts == "replayed", own=telemetry)
        self.counts_executed = counts == "replayed"
        self._trace = trace
        self._missing = missing
        self._gate_weights = gate_weights
        self._sums = AgreementSums(LOG10_EDGES) if telemetry else None
        self._counts_LE: Tensor | None = None
        self._rows: ReplayRows | None = None
        self._loss_mask_BT: Tensor | None = None
        self._mask_was_read = False
        self._drops = False
        self._compared: list[tuple[Batch, Tensor]] = []

    def begin(self, batch: Batch) -> ReplayRows:
        """Locate the rows of the batch."""
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        row_of_slot = self._rows_known_by_shape(batch)
        if row_of_slot is None:
            row_of_slot = self._located(batch)
        self._rows = ReplayRows.gather(
            self._trace, row_of_slot, batch.device, self._missing, weights=self._gate_weights
        )
        self._loss_mask_BT = self._rows.counted_R.view(batch.shape)
        if self._missing == "drop" and not self._drops:
            self._drops = bool((is_faithful(self._trace, row_of_slot) != (row_of_slot >= 0)).any())
        return self._rows

    def _located(self, batch: Batch) -> NDArray[np.int64]:
        return locate_rows(self._trace, batch.input_ids_BT, batch.mask_BT, batch.starts_BT)

    def _rows_known_by_shape(self, batch: Batch) -> NDArray[np.int64] | None:
        """int64 [R], where the shape of a batch on a GPU says which slot is which row; else None.

        So the host need not wait for the tokens. They are compared on the device, whose answer is looked at last.
        """
        ids_BT = batch.lone_tokens_BT
        if ids_BT is None or batch.device.type == "cpu" or len(self._trace) != batch.shape[0]:
            return None
        if (self._trace.lengths != batch.shape[1]).any():
            return None
        batch.keep()
        expected_R = to_device(self._trace.token_ids_N.astype(np.int64), batch.device)
        self._compared.append((batch, (ids_BT.reshape(-1) != expected_R).any()))
        return np.arange(batch.num_slots)

    def end(self, batch: Batch, notes: PassNotes) -> None:
        """Add up the telemetry, on the device."""
        self.num_forwards += 1
        if self._sums is None or self._rows is None:
            return
        self._sums.add(notes, self._rows)
        counted = required(notes.ids_LRK if self.counts_executed else notes.own_ids_LRK)
        counts_LE = count_experts(counted, self._rows.real_R, self._trace.spec.num_experts)
        self._counts_LE = counts_LE if self._counts_LE is None else self._counts_LE + counts_LE

    def close(self) -> None:
        """Called when the session ends without an error. Waits for the device where tokens were compared there.

        Raises:
            BatchMismatchError: when they were others than those of the trace.
            ReplayError: when it was a session in name only.
        """
        if self._compared and bool(torch.stack([differs for _, differs in self._compared]).any()):
            for batch, _ in self._compared:
                self._located(batch)
        require_effect(self.num_forwards, owes_mask=self._drops and not self._mask_was_read)

    @property
    def loss_mask_BT(self) -> Tensor:
        """Bool [B, T] on the device: tokens of the last forward that belong in the loss, in the place of each token.

        Padding is False. Under `missing="drop"` so is a token with a row before it, in its sequence, that was not
        replayed. To weigh predictions made at position p, take `loss_mask_BT[:, 1:]`.

        Raises:
            ReplayError: before the first forward.
        """
        if self._loss_mask_BT is None:
            raise ReplayError("there is no loss mask before the first forward of a session")
        self._mask_was_read = True
        return self._loss_mask_BT

    def agreement(self) -> LiveAgreement:
        """The model's own selections beside the replayed ones, over all forwards so far. Waits for the device, once.

        Recomputation in backward is not counted again.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        sums = {} if self._sums is None else self._sums.to_host()
        if not sums:
            raise ReplayError("no telemetry: open the session with replay(trace, telemetry=True) and run a forward")
        return LiveAgreement.from_sums(sums, self._trace.spec.top_k)

    def expert_counts_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], tokens of each expert over all forwards so far, by the session's `counts`; padding left out.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        if self._counts_LE is None:
            raise ReplayError("no telemetry: open the session with replay(trace, telemetry=True) and run a forward")
        return np.asarray(self._counts_LE.cpu().numpy())
