"""Choices of sparse-attention indexers on several ranks: replayed as on one process, and by the same queries."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.trace import INDEXER
from tests.adapters.hf.model_runs import log_probs
from tests.ep import training_worker
from tests.ep.test_training import errors, of_all_ranks
from tests.ep.training import Case, batch, decisions, policy, train_alone

CASES = [
    Case("deepseek_v32", 2, plan=4, dtype=torch.float64, use_reentrant=True),
    # the second layer follows the choice of the first
    pytest.param(Case("glm_moe_dsa", 2, plan=5, dtype=torch.float64, use_reentrant=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_training_on_choices_is_that_of_one_process(workers, case):
    outcomes = workers(case.ranks).run(training_worker.train, case)
    truth = train_alone(case.alone)
    found = errors(of_all_ranks(outcomes), truth)
    assert all(error < 1e-13 for error in found.values()), found


def test_every_rank_attends_to_what_its_own_trace_says(workers):
    """And to other units without it, which the comparison of losses would see."""
    case = Case("deepseek_v32", 2, dtype=torch.float64)
    for executed, other, losses in workers(case.ranks).run(attended, case):
        assert executed
        assert not other
        assert abs(losses[0] - losses[1]) > 1e-3


def attended(rank, case):
    """Whether a forward on several ranks hands on the choices of the trace, with it and without, and both losses."""
    model = policy(case)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    trace, followed, losses = decisions(routed, case, rank, 0, 1), [], []
    for replayed in (trace, trace.without_streams("indexer")):
        with routed.replay(replayed), routed.record(indexers=True) as recording, torch.no_grad():
            losses.append(float(log_probs(placed.model, batch(rank, 0, 1)).mean()))
        own, handed_in = (each.streams[INDEXER].arrays() for each in (recording.trace(), trace))
        followed.append(all(np.array_equal(own[name], handed_in[name]) for name in own.keys() | handed_in.keys()))
    return *followed, losses
