"""Rows without a route: what each policy does with them, and which tokens they taint.

Row p routes input position p, and attention carries what it did to every later position. So the log-probability of a
token was computed under the routing of the rollout only if every row *before* the token was replayed. The row of the
last token of a sequence is before no token: no engine computes it, and it is routed by the model under every policy.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError
from foreroute.trace import RoutingTrace

MissingRows = Literal["error", "native", "drop"]
"""What to do when a row other than the last of its sequence has no route.

"error" refuses the batch. "native" lets the model route the row itself and uses every token. "drop" routes likewise and
takes every later token of the sequence out of the loss.
"""


def is_routed(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool [R], slots whose row has a route; padding has none."""
    if not trace.num_rows:
        return np.zeros(len(row_of_slot), np.bool_)
    return np.asarray((row_of_slot >= 0) & trace.valid_N[row_of_slot])


def is_faithful(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Bool [R], tokens before which every row of their sequence has a route; False for padding.

    The first token of a sequence has no row before it. It is nowhere predicted, so that it may count as either.
    """
    missing_before_N1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(~trace.valid_N)])
    first_N = np.repeat(trace.offsets[:-1], trace.lengths)
    faithful_N = missing_before_N1[:-1] == missing_before_N1[first_N]
    real = row_of_slot >= 0
    if not trace.num_rows:
        return real
    return np.asarray(real & faithful_N[row_of_slot])


def refuse_missing(trace: RoutingTrace, row_of_slot: NDArray[np.int64]) -> None:
    """Raise unless every token of the batch is faithful.

    Raises:
        BatchMismatchError: naming the first row that is missing.
    """
    tainted = (row_of_slot >= 0) & ~is_faithful(trace, row_of_slot)
    if not tainted.any():
        return
    sequence = int(np.searchsorted(trace.offsets, row_of_slot[tainted].min(), side="right") - 1)
    start, end = trace.offsets[sequence : sequence + 2]
    position = int(np.argmin(trace.valid_N[start:end]))
    raise BatchMismatchError(
        f"sequence {sequence} has no route at position {position}, and {int(tainted.sum())} later tokens of the batch "
        "depend on such rows. Record the missing rows, leave the sequence out, or say what to do without them: "
        'missing="drop" takes those tokens out of the loss, missing="native" lets the model route the rows'
    )
