"""One trajectory from several captures: later turns, resumed rollouts, rows that one capture lacks and another has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreroute.errors import BatchMismatchError
from foreroute.trace.check import segment_rows
from foreroute.trace.container import RoutingTrace, common_provenance
from foreroute.trace.gate_weights import joined_gate_weights


def extended(earlier: RoutingTrace, later: RoutingTrace, *, replace_routed: bool = False) -> RoutingTrace:
    """The sequences of `later`, with the rows that `earlier` had already routed.

    Each sequence of `earlier` must be a beginning of the sequence of the same number in `later`. A row that both routed
    keeps the routes and the weight version of `earlier`, because the log-probabilities of its token came from there.

    Args:
        earlier: S sequences.
        later: S sequences, each at least as long.
        replace_routed: take a row that both routed from `later` instead.

    Raises:
        SpecMismatchError: when the traces come from different models.
        TraceContentError: when one has gate weights and the other does not.
        BatchMismatchError: when a sequence of `later` does not begin with the tokens of `earlier`.
    """
    earlier.spec.require_same(later.spec, what="the later capture")
    if len(earlier) != len(later) or (later.lengths < earlier.lengths).any():
        raise BatchMismatchError(
            f"sequences of lengths {earlier.lengths.tolist()[:8]} cannot be extended by sequences of lengths "
            f"{later.lengths.tolist()[:8]}; expected as many, none shorter. Pass the whole sequence so far"
        )
    shared = segment_rows(later.offsets[:-1], earlier.lengths)
    differing = np.flatnonzero(later.token_ids_N[shared] != earlier.token_ids_N)
    if differing.size:
        row = int(differing[0])
        sequence = int(np.searchsorted(earlier.offsets, row, side="right") - 1)
        raise BatchMismatchError(
            f"sequence {sequence} has token {int(later.token_ids_N[shared[row]])} at position "
            f"{row - int(earlier.offsets[sequence])}, the earlier capture has {int(earlier.token_ids_N[row])}. "
            "Send token ids, not text, from turn to turn; a rewritten history starts a new trajectory"
        )
    kept = earlier.valid_N & ~later.valid_N[shared] if replace_routed else earlier.valid_N
    rows = shared[kept]
    expert_ids, valid, versions = later.expert_ids_NLK.copy(), later.valid_N.copy(), later.weight_versions_N.copy()
    expert_ids[rows] = earlier.expert_ids_NLK[kept]
    valid[rows] = True
    versions[rows] = earlier.weight_versions_N[kept]
    weights = joined_gate_weights([earlier, later])
    if weights is not None:
        earlier_weights, weights = np.split(weights, [earlier.num_rows])
        weights[rows] = earlier_weights[kept]
    return replace(
        later,
        expert_ids_NLK=expert_ids,
        valid_N=valid,
        weight_versions_N=versions,
        provenance=common_provenance([earlier.provenance, later.provenance]),
        pick_order_kept=earlier.pick_order_kept and later.pick_order_kept,
        gate_weights_NLK=weights,
    )
