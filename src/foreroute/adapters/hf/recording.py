"""Routes as a model takes them: whole batches, or a prefill and the decode steps that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.passes import Listener
from foreroute.errors import ReplayError
from foreroute.replay import PassNotes, Watch, required
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace, concatenate


@dataclass(frozen=True)
class RecordedPass:
    """One forward: its tokens, and what was selected (by which margin, with which weights), still on the device."""

    batch: Batch
    ids_LRK: Tensor
    margin_LR: Tensor | None
    weights_LRK: Tensor | None


class Recording(Listener):
    """Collects the routes of every forward in a `record()` session.

    Forwards that start without a key-value cache begin new sequences; forwards with one continue the sequences of the
    forward before them, row by row. Nothing is copied to the host before `trace()` is called.
    """

    def __init__(
        self, spec: RoutingSpec, weight_version: int, provenance: dict[str, str], *, margins: bool, weights: bool
    ) -> None:
        self._spec = spec
        self._version = weight_version
        self._provenance = provenance
        self._with_margins = margins
        self.watch = Watch(ids=True, own=margins, weights=weights)
        self._passes: list[RecordedPass] = []

    def end(self, batch: Batch, notes: PassNotes) -> None:
        """Keeps the pass; one that failed is forgotten."""
        margin_LR = notes.margin_LR if self._with_margins else None
        weights_LRK = notes.weights_LRK if self.watch.weights else None
        self._passes.append(RecordedPass(batch, required(notes.ids_LRK), margin_LR, weights_LRK))

    def trace(self) -> RoutingTrace:
        """Everything recorded so far, in the order of the forwards, of their rows, and of the sequences in a row.

        Padding before and after the prompt is left out. What a finished sequence of `generate` goes on with is not
        known to be padding: cut it with `trace.truncated`. Beams that change places are not followed. Rows carry the
        weight version given to `record()`.

        Raises:
            ReplayError: when no forward ran in the session.
        """
        if not self._passes:
            raise ReplayError("nothing was recorded: no forward of the attached model ran in the record() session")
        traces = [self._trace_of(group) for group in self._groups()]
        return concatenate(traces).with_weight_version(self._version).with_provenance(**self._provenance)

    def margins_NL(self) -> NDArray[np.float32]:
        """float32 [N, L]: K-th minus (K+1)-th selection score of each row of `trace()`, in the router's own scale.

        Raises:
            ReplayError: when the session was not opened with `margins=True`.
        """
        if not self._with_margins or not self._passes:
            raise ReplayError("no margins were recorded; open the session with record(margins=True) and run a forward")
        parts = []
        for group in self._groups():
            kept_BT = _joined_mask(group)
            margins_LBT = [
                np.concatenate([required(p.margin_LR)[layer].cpu().numpy().reshape(len(kept_BT), -1) for p in group], 1)
                for layer in range(self._spec.num_layers)
            ]
            parts.append(np.stack([m[kept_BT] for m in margins_LBT], axis=-1))
        return np.concatenate(parts).astype(np.float32)

    def _groups(self) -> list[list[RecordedPass]]:
        """Passes that belong to the same sequences."""
        groups: list[list[RecordedPass]] = []
        for recorded in self._passes:
            rows = len(recorded.batch.input_ids_BT)
            if recorded.batch.past == 0 or not groups:
                groups.append([recorded])
                continue
            first = groups[-1][0].batch
            reached = first.past + sum(p.batch.input_ids_BT.shape[1] for p in groups[-1])
            if (rows, recorded.batch.past) != (len(first.input_ids_BT), reached):
                raise ReplayError(
                    f"a forward continues {rows} sequences with {recorded.batch.past} cached positions; the batch "
                    f"before it has {len(first.input_ids_BT)} of {reached}. Record each batch of sequences, and what "
                    "follows a cache that was cut, in a session of its own"
                )
            groups[-1].append(recorded)
        return groups

    def _trace_of(self, group: list[RecordedPass]) -> RoutingTrace:
        kept_BT = _joined_mask(group)
        tokens_BT = np.concatenate([p.batch.input_ids_BT for p in group], axis=1)
        ids_NLK = self._packed([p.ids_LRK for p in group], kept_BT)
        ends = np.cumsum(_sequence_lengths(group, kept_BT))[:-1]
        trace = RoutingTrace.from_sequences(
            self._spec, np.split(tokens_BT[kept_BT], ends), np.split(ids_NLK, ends), weight_version=NO_VERSION
        )
        if not self.watch.weights:
            return trace
        return trace.with_gate_weights(self._packed([required(p.weights_LRK) for p in group], kept_BT))

    def _packed(self, parts_LRK: list[Tensor], kept_BT: NDArray[np.bool_]) -> NDArray[Any]:
        """[N, L, K], the rows that are kept of forwards that continue each other."""
        shape = (self._spec.num_layers, len(kept_BT), -1, self._spec.top_k)
        joined_LBTK = np.concatenate([part.cpu().numpy().reshape(shape) for part in parts_LRK], axis=2)
        return np.asarray(joined_LBTK.transpose(1, 2, 0, 3)[kept_BT])


def _sequence_lengths(group: list[RecordedPass], kept_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    starts_BT = group[0].batch.starts_BT
    if starts_BT is None:
        return np.asarray(kept_BT.sum(axis=1))
    if len(group) > 1:
        raise ReplayError(
            "sequences packed into one row cannot be continued with a key-value cache: which of them a later token "
            "belongs to is not known. Record such a batch in one forward"
        )
    return np.diff(np.flatnonzero(starts_BT[kept_BT]), append=kept_BT.sum())


def _joined_mask(group: list[RecordedPass]) -> NDArray[np.bool_]:
    return np.concatenate([p.batch.kept_BT for p in group], axis=1)
