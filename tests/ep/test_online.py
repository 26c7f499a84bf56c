"""Executors that see only now, the baselines of plans: they train as no plan does, and their plans are what they say.

So a comparison with them is one of when a plan is known, and of nothing else.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.harness.execution_bench import Bench
from benchmarks.harness.executor_counts import posting
from benchmarks.harness.online_execution import executing_online
from benchmarks.harness.online_plans import BASELINES, eplb, filled_exactly
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import verify
from foreroute.plan.counts import counts_digest
from tests.ep.spread_steps import MICRO_STEPS, SpreadStep
from tests.roundings import GRADIENT_TERMS, TERMS, roundings
from tests.tiers import grid


@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 8), (4, 8), (8, 32)])
def test_moonep_s_way_levels_all_ranks_and_each_borrows_from_one(num_ranks, num_experts):
    rng = np.random.default_rng(num_ranks)
    for _ in range(50):
        home_E = rng.permutation(block_homes(num_experts, num_ranks)).astype(np.int16)
        counts_GE = rng.poisson(rng.pareto(1.0, num_experts) * 8, (num_ranks, num_experts)).astype(np.int64)
        expert_H, rank_H, tokens_HG = filled_exactly(counts_GE, home_E, num_experts // num_ranks)
        served_GE = np.zeros_like(counts_GE)
        np.add.at(served_GE.T, expert_H, tokens_HG)
        assert (served_GE == counts_GE).all()
        assert tokens_HG.min() >= 0
        assert np.ptp(np.bincount(rank_H, tokens_HG.sum(1), num_ranks)) <= 1
        is_lent_H = home_E[expert_H] != rank_H
        lenders = set(zip(rank_H[is_lent_H], home_E[expert_H[is_lent_H]], strict=True))
        assert len(lenders) == len(set(rank_H[is_lent_H]))


def test_moonep_s_way_gives_what_has_most_left_to_who_lacks_most():
    counts_GE = np.zeros((4, 8), np.int64)
    counts_GE[3] = 14, 12, 5, 3, 4, 0, 6, 4
    expert_H, rank_H, tokens_HG = filled_exactly(counts_GE, block_homes(8, 4).astype(np.int16), 2)
    served = {(e, g): int(n) for e, g, n in zip(expert_H, rank_H, tokens_HG.sum(1), strict=True)}
    # ranks have 26, 8, 4 and 10: 8 of expert 0 go to the third, then of expert 1 four to the second and two to the last
    expected = {(0, 0): 6, (0, 2): 8, (1, 0): 6, (1, 1): 4, (1, 3): 2, (2, 1): 5, (3, 1): 3, (4, 2): 4, (6, 3): 6}
    assert served == expected | {(7, 3): 4}


def test_eplb_of_a_cell_replicates_what_is_heaviest_and_splits_it_evenly():
    counts_GE = np.array([[30, 2, 4, 1], [30, 4, 2, 1]], np.int64)
    expert_H, rank_H, tokens_HG = eplb(counts_GE, np.array([0, 0, 1, 1], np.int16), 1)
    # two more copies of expert 0: on rank 1, which has least, and on rank 0, where its home has it already
    assert list(zip(expert_H, rank_H, strict=True)) == [(0, 0), (0, 1), (1, 0), (2, 1), (3, 1)]
    assert tokens_HG.tolist() == [[20, 20], [10, 10], [2, 4], [4, 2], [1, 1]]


def trained(rank, folder, name):
    """A step of a rival and one without a plan, what was posted, and the plan, which other code has verified."""
    s = SpreadStep(rank, folder, checkpointed=True, dtype=torch.float64)
    s.routed.use(TransferOptions(paths="host"))
    with s.execute(None):
        losses, grads = s.update(), s.gradients()
    rows_M = [s.routed.rows(trace) for trace in s.traces]
    s.traces = rows_M
    bench = Bench(s.routed, [], [], rows_M, s.counts_MLGE)
    Bench.number += 1
    with posting([]) as posted, executing_online(bench, BASELINES[name], bench.topology) as execution:
        begun = len(posted.order)
        found = s.update()
        during = posted.order[begun:]
    loads_MLG = verified(execution.plan, bench.counts_MLGE)
    assert (execution.executed_ML == loads_MLG[..., rank]).all()
    fetched = [record for record in execution.transfers if record.kind == "fetch"]
    differences = {name: float((grad - grads[name]).abs().max()) for name, grad in s.gradients().items()}
    s.routed.close()
    return {
        "losses": (found, losses),
        "grads": (max(differences.values()), max(float(grad.abs().max()) for grad in grads.values())),
        "counts": during.count("counts"),
        "by_host": sum(record.host_bytes for record in fetched),
        "direct": sum(record.direct_bytes for record in fetched),
        "loads_MLG": loads_MLG,
    }


def verified(plan, counts_MLGE):
    """int64 [M, L, G], loads of a plan that every assignment, slot and fetch of is checked."""
    shape = plan.shape[:2]
    loads = [plan.cell(m, layer).loads_G(counts_MLGE[m, layer]) for m, layer in np.ndindex(*shape)]
    loads_MLG = np.stack(loads).reshape(*shape, -1)
    loads = {"max_load_ML": loads_MLG.max(-1), "bound_ML": loads_MLG.mean(-1)}
    figures = loads | {"counts_digest": counts_digest(counts_MLGE)}
    verify(replace(plan, hosts=plan.hosts.part(0, shape[0]), **figures), counts_MLGE)
    return loads_MLG


@grid("name", list(BASELINES), quick=2)
def test_a_rival_trains_as_no_plan_does_and_gathers_counts_once_in_every_cell(workers, folder_of, name):
    outcomes = workers(2).run(trained, folder_of(), name)
    for outcome in outcomes:
        assert np.allclose(*outcome["losses"], rtol=roundings(TERMS, torch.float64), atol=0)
        difference, largest = outcome["grads"]
        assert difference < roundings(GRADIENT_TERMS, torch.float64) * largest
        loads_MLG = outcome["loads_MLG"]
        assert outcome["counts"] == MICRO_STEPS * loads_MLG.shape[1]
        assert "exact" not in name or np.ptp(loads_MLG, axis=-1).max() <= 1
        assert outcome["direct"] == 0
    assert sum(outcome["by_host"] for outcome in outcomes) > 0
