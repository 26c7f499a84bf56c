"""What each replayed row showed, counted on the device: in how many layers its router would pick otherwise.

Layers below are the rollout's in a replayed pass, so that a router that still disagrees is no consequence of another.
`foreroute.mismatch.Sentinel` judges these counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreroute.core.passes import Interceptor, Pass, RecordOptions, is_in
from foreroute.errors import ConfigError, ReplayError
from foreroute.mismatch import RootCounts
from foreroute.replay.session import RoutedModel


class RootRows(Interceptor):
    """Counts the roots of each row in replayed passes of a model on Hugging Face. Nothing waits before `read`.

    Raises `ConfigError` for a model whose ranks have rows in another order, or parts of sequences.
    """

    options = RecordOptions(native=True)

    def __init__(self, routed: RoutedModel) -> None:
        if not routed.has_rows_by_sequence:
            raise ConfigError(
                f"the sentinel was asked for on a {type(routed).__name__}, whose ranks do not have rows sequence by "
                "sequence; it watches models of hf.attach"
            )
        self._counts: list[Tensor] = []  # int32 of each pass: [5, R] and [L], flat
        self._shapes: list[tuple[int, int]] = []

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Count a pass that replayed rows."""
        if current is None or current.rows is None:
            return
        ids_LRK, native_LRK, real_R = current.rows.ids_LRK, current.native_LRK, current.rows.real_R
        replayed_LR = ids_LRK[..., 0] >= 0
        if real_R is not None:  # padding may be replayed too
            replayed_LR = replayed_LR & real_R
        roots_LR = ~is_in(native_LRK, ids_LRK).all(-1) & replayed_LR
        # of a row beside the one before it; the first row has none
        pairs_LR = replayed_LR[:, 1:] & replayed_LR[:, :-1]
        rows_5R = ids_LRK.new_zeros((5, ids_LRK.shape[1]), dtype=torch.int32)
        rows_5R[0] = replayed_LR.any(0) if real_R is None else real_R
        rows_5R[1] = roots_LR.sum(0)
        rows_5R[2, 1:] = (is_in(native_LRK[:, 1:], ids_LRK[:, :-1]).all(-1) & pairs_LR).sum(0)
        rows_5R[3, :-1] = (is_in(native_LRK[:, :-1], ids_LRK[:, 1:]).all(-1) & pairs_LR).sum(0)
        rows_5R[4, 1:] = ((ids_LRK[:, 1:] == ids_LRK[:, :-1]).all(-1) & pairs_LR).sum(0)
        self._counts.append(torch.cat([rows_5R.flatten(), roots_LR.sum(1, dtype=torch.int32)]))
        self._shapes.append((ids_LRK.shape[1], len(ids_LRK)))

    def read(self, lengths_S: Any) -> RootCounts:
        """Give what was counted of S sequences, packed in the order in which passes ran them, and start anew.

        Waits for the device, once: call it where the host waits anyway. `lengths_S` are the rows of each sequence.
        Raises `ReplayError` when no pass ran.
        """
        if not self._counts:
            raise ReplayError("no pass was counted: open listening(rows) around a replayed forward of the model")
        counts = torch.cat(self._counts).cpu().numpy()
        passes, start = [], 0
        for num_rows, num_layers in self._shapes:
            rows_5R, roots_L = np.split(counts[start : start + 5 * num_rows + num_layers], [5 * num_rows])
            rows_5R = rows_5R.reshape(5, num_rows)
            passes.append((rows_5R[1:, rows_5R[0] > 0], roots_L))
            start += 5 * num_rows + num_layers
        self._counts, self._shapes = [], []
        roots_N, before_N, after_N, repeats_N = np.concatenate([rows for rows, _ in passes], axis=1)
        roots_L = np.sum([roots_L for _, roots_L in passes], axis=0)
        return RootCounts(roots_N, before_N, after_N, repeats_N, roots_L, lengths_S)
