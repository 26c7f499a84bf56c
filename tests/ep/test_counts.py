"""Counts of all ranks, from the traces that each of them replays."""

import numpy as np

from foreroute.adapters import hf
from tests.ep.training import MICRO_STEPS, Case, policy, routes

CASE = Case(ranks=2, missing="second")


def gathered(rank):
    """From traces and from what `rows` made of them; a rank has no sequences in the second micro-step."""
    routed = hf.attach(policy(CASE))
    hf.distribute(routed.model, timeout_s=20)
    traces = [routes(routed.spec, CASE, rank, 0, m) for m in range(MICRO_STEPS)]
    if rank:
        traces[1] = traces[1].select([])
    found = routed.gather_counts(traces)
    assert np.array_equal(found, routed.gather_counts([routed.rows(trace) for trace in traces]))
    return found, [[(trace.expert_ids_NLK, trace.valid_N)] for trace in traces]


def test_every_rank_gets_the_counts_of_all(workers):
    (found_MLGE, first), (other_MLGE, second) = workers(2).run(gathered)
    np.testing.assert_array_equal(found_MLGE, other_MLGE)
    for g, traces in enumerate((first, second)):
        for m, [(ids_NLK, valid_N)] in enumerate(traces):
            for layer, expert in np.ndindex(found_MLGE.shape[1], found_MLGE.shape[3]):
                assert found_MLGE[m, layer, g, expert] == (ids_NLK[valid_N, layer] == expert).sum()
    assert found_MLGE[0, :, 0].sum()
    assert not found_MLGE[1, :, 1].sum()
