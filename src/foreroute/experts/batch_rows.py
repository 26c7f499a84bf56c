"""Which rows of a rank's micro-batch the plan has counted, and which are sent to experts at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import CountsError
from foreroute.layout import locate_rows
from foreroute.trace import RoutingTrace, count_assignments


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of one micro-batch of one rank, flattened batch first.

    Attributes:
        planned_N: bool [N], rows whose assignments are among the planned counts; None for all that are sent.
        sent_N: bool [N], rows that experts compute; None for all. A row that is not sent gets zeros from the routed
            experts, and costs nothing; right for padding, which nobody looks at.
        routed_LE: int64 [L, E], assignments of the planned rows, where they are known before the forward, as under
            replay. None when routers are free: counts are then exchanged in every cell.
    """

    planned_N: NDArray[np.bool_] | None = None
    sent_N: NDArray[np.bool_] | None = None
    routed_LE: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.planned_N is None or self.sent_N is None:
            return
        if self.planned_N.shape != self.sent_N.shape or (self.planned_N & ~self.sent_N).any():
            raise CountsError(
                f"{self.planned_N.sum()} of {self.planned_N.size} rows are planned and {self.sent_N.sum()} of "
                f"{self.sent_N.size} are sent; expected masks of the same rows, with everything that is planned sent"
            )

    @classmethod
    def replayed(
        cls,
        trace: RoutingTrace,
        input_ids_BT: ArrayLike,
        attention_mask_BT: ArrayLike | None = None,
        starts_BT: ArrayLike | None = None,
    ) -> BatchRows:
        """The rows of a batch on which `trace` is replayed.

        Rows that the trace has a route for are planned. Padding is not sent. Any other row, such as that of a last
        sampled token, is routed by the model itself when its turn comes, so no plan can count it: it is sent to a home
        and counts are exchanged in all cells of a micro-step in which any rank has such a row. A batch that leaves out
        the last token of each sequence has none.

        Args:
            trace: what is replayed.
            input_ids_BT: integers [B, T], as the model is called with.
            attention_mask_BT: 0 or 1 [B, T], 0 for padding; everything is a token by default.
            starts_BT: bool [B, T], the first token of each sequence where rows hold several.

        Raises:
            BatchMismatchError: when batch and trace hold different tokens.
        """
        row_N = locate_rows(trace, input_ids_BT, attention_mask_BT, starts_BT)
        sent_N = row_N >= 0
        planned_N = sent_N.copy()
        planned_N[sent_N] = trace.valid_N[row_N[sent_N]]
        # no routed row of the trace is left out of the batch
        (routed_LE,) = count_assignments(trace, np.zeros(len(trace), np.int64))
        return cls(planned_N, sent_N, routed_LE)

    @property
    def all_planned(self) -> bool:
        """Whether no row is sent that the plan has not counted."""
        if self.planned_N is None:
            return True
        return bool(self.planned_N.all() if self.sent_N is None else (self.planned_N == self.sent_N).all())
