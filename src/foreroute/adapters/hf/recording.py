"""Routes as a model takes them: whole batches, or a prefill and the decode steps that follow it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.intercept import Listener
from foreroute.adapters.hf.selection_mode import Selection
from foreroute.errors import ReplayError
from foreroute.replay import ReplayRows
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace, concatenate


@dataclass
class RecordedPass:
    """One forward: its tokens, and per layer the selected ids [R, K] (and margins [R]), still on the device."""

    batch: Batch
    ids: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)


class Recording(Listener):
    """Collects the routes of every forward in a `record()` session.

    Forwards that start without a key-value cache begin new sequences; forwards with one continue the sequences of the
    forward before them, row by row. Nothing is copied to the host before `trace()` is called.
    """

    def __init__(self, spec: RoutingSpec, weight_version: int, provenance: dict[str, str], margins: bool) -> None:
        self._spec = spec
        self._version = weight_version
        self._provenance = provenance
        self._with_margins = margins
        self._passes: list[RecordedPass] = []
        self._open: RecordedPass | None = None

    def begin(self, batch: Batch) -> ReplayRows | None:
        """Starts a pass; one that failed before its end is forgotten."""
        self._open = RecordedPass(batch)
        return None

    def selected(self, layer: int, selection: Selection) -> None:
        """Keeps the executed ids, narrowed to the width of the trace."""
        if self._open is None:
            raise ReplayError("a router selected before the forward of its model began")
        narrow = torch.uint8 if self._spec.num_experts <= 256 else torch.uint16
        self._open.ids.append(selection.ids_RK.detach().to(narrow))
        if self._with_margins:
            self._open.margins.append(_margin(selection.scores_RE.detach(), self._spec.top_k))

    def end(self, batch: Batch) -> None:
        """Keeps the pass."""
        if self._open is not None:
            self._passes.append(self._open)
        self._open = None

    def trace(self) -> RoutingTrace:
        """Everything recorded so far, one sequence per batch row, in the order of the forwards.

        Padding is left out. Rows carry the weight version given to `record()`.

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
                np.concatenate([p.margins[layer].float().cpu().numpy().reshape(len(kept_BT), -1) for p in group], 1)
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
            elif rows != len(groups[-1][0].batch.input_ids_BT):
                raise ReplayError(
                    f"a forward continues {rows} cached sequences after one of "
                    f"{len(groups[-1][0].batch.input_ids_BT)}; record each batch of sequences in a session of its own"
                )
            else:
                groups[-1].append(recorded)
        return groups

    def _trace_of(self, group: list[RecordedPass]) -> RoutingTrace:
        kept_BT = _joined_mask(group)
        num_sequences = len(kept_BT)
        tokens_BT = np.concatenate([p.batch.input_ids_BT for p in group], axis=1)
        ids_BTLK = np.concatenate(
            [
                torch.stack(p.ids).cpu().numpy().reshape(self._spec.num_layers, num_sequences, -1, self._spec.top_k)
                for p in group
            ],
            axis=2,
        ).transpose(1, 2, 0, 3)
        return RoutingTrace.from_sequences(
            self._spec,
            [tokens[kept] for tokens, kept in zip(tokens_BT, kept_BT, strict=True)],
            [ids[kept] for ids, kept in zip(ids_BTLK, kept_BT, strict=True)],
            weight_version=NO_VERSION,
        )


def _joined_mask(group: list[RecordedPass]) -> NDArray[np.bool_]:
    masks = [
        np.ones(p.batch.input_ids_BT.shape, np.bool_) if p.batch.mask_BT is None else p.batch.mask_BT for p in group
    ]
    return np.concatenate(masks, axis=1)


def _margin(scores_RE: Tensor, top_k: int) -> Tensor:
    best = torch.topk(scores_RE.float(), min(top_k + 1, scores_RE.shape[-1]), dim=-1).values
    return best[:, top_k - 1] - best[:, -1]
