"""Executors that see only now, the rivals of plans: they train as one process does, and their plans are what they say.

So a comparison with them is one of when a plan is known, and of nothing else.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.harness.execution_bench import Bench
from benchmarks.harness.executor_counts import posting
from benchmarks.harness.online_execution import executing_online
from benchmarks.harness.online_plans import RIVALS, eplb, filled_exactly
from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import verify
from foreroute.plan.counts import counts_digest
from tests.adapters.hf.model_runs import log_probs
from tests.ep.test_training import relative
from tests.ep.training import MICRO_STEPS, Case, batch, num_targets, policy, replaying, train_alone
from tests.ep.training_worker import all_rows, whole_gradients
from tests.tiers import grid

CASE = Case(ranks=2, use_reentrant=False, dtype=torch.float64)


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


def trained(rank, name):
    """The first step of `train_alone`, what was posted in it, and the plan, which other code has verified."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    placed.use(TransferOptions())
    rows_M = all_rows(routed, CASE, rank, 0)
    bench = Bench(routed, placed, [], [], rows_M, routed.gather_counts(rows_M))
    Bench.number += 1
    pending = []
    with posting([]) as posted, executing_online(bench, RIVALS[name], bench.topology) as execution:
        begun = len(posted.order)
        for m, rows in enumerate(rows_M):
            with replaying(routed, CASE, rank, 0, m, rows):
                pending.append(-log_probs(placed.model, batch(rank, 0, m)).sum() / num_targets(CASE.ranks, 0))
        # slots have served another micro-step since, and every layer is computed anew
        for loss in pending:
            loss.backward()
        during = posted.order[begun:]
    placed.sum_gradients()
    loads_MLG = verified(execution.plan, bench.counts_MLGE)
    assert (execution.executed_ML == loads_MLG[..., rank]).all()
    placed.close()
    fetched = [record for record in execution.transfers if record.kind == "fetch"]
    return {
        "losses": [loss.item() for loss in pending],
        "grads": whole_gradients(placed),
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


@grid("name", list(RIVALS), quick=2)
def test_a_rival_trains_as_one_process_does_and_gathers_counts_once_in_every_cell(workers, name):
    outcomes = workers(CASE.ranks).run(trained, name)
    truth = train_alone(CASE.alone)
    losses = torch.tensor([outcome["losses"] for outcome in outcomes], dtype=torch.float64).T.flatten()
    assert torch.allclose(losses, truth["losses"][: len(losses)], rtol=1e-13, atol=0)
    for outcome in outcomes:
        assert max(map(float, relative(outcome["grads"], truth["grads"]))) < 1e-13
        loads_MLG = outcome["loads_MLG"]
        assert outcome["counts"] == MICRO_STEPS * loads_MLG.shape[1]
        assert "exact" not in name or np.ptp(loads_MLG, axis=-1).max() <= 1
        assert outcome["direct"] == 0
    assert sum(outcome["by_host"] for outcome in outcomes) > 0
