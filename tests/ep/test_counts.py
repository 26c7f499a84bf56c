"""Counts of all ranks, from the traces that each of them replays."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch.distributed as dist

from tests.ep.spread_steps import SpreadStep
from tests.ep.test_refusals import without_route


def gathered(rank, folder):
    """From traces and from what `rows` made of them; a rank has no sequences in the second micro-step."""
    s = SpreadStep(rank, folder, slots=0)
    traces = [without_route(trace, "second") for trace in s.traces]
    if rank:
        traces[1] = traces[1].select([])
    found = s.routed.gather_counts(traces)
    assert np.array_equal(found, s.routed.gather_counts([s.routed.rows(trace) for trace in traces]))
    mine_ML = np.arange(6).reshape(3, 2)
    executions = [SimpleNamespace(executed_ML=each + 10 * rank) for each in (mine_ML[:1], mine_ML[1:])]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as call:
        executed_MLG = s.routed.spread.gather_executed(executions)
    assert call.call_args.kwargs["group"] is not s.routed.spread._group, "which may be NCCL's, of no host tensors"
    assert np.array_equal(executed_MLG, mine_ML[..., None] + [0, 10])
    return found, [[(trace.expert_ids_NLK, trace.valid_N)] for trace in traces]


def test_every_rank_gets_the_counts_of_all(workers, folder_of):
    (found_MLGE, first), (other_MLGE, second) = workers(2).run(gathered, folder_of())
    np.testing.assert_array_equal(found_MLGE, other_MLGE)
    for g, traces in enumerate((first, second)):
        for m, [(ids_NLK, valid_N)] in enumerate(traces):
            for layer, expert in np.ndindex(found_MLGE.shape[1], found_MLGE.shape[3]):
                assert found_MLGE[m, layer, g, expert] == (ids_NLK[valid_N, layer] == expert).sum()
    assert found_MLGE[0, :, 0].sum()
    assert not found_MLGE[1, :, 1].sum()
