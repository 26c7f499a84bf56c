"""Columns of a dispatcher, against rows that are dealt out one by one."""

import numpy as np
import torch

from foreroute.adapters.megatron.plan_execution.columns import CellColumns
from foreroute.plan import Topology
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.plan.random_plans import LINKS, random_plan

RANKS, EXPERTS, TOP_K, SLOTS = 4, 8, 3, 2
WIDTH = EXPERTS // RANKS + SLOTS


@on_ranks(1)
def test_rows_take_the_columns_that_the_plan_gives_them():
    for seed in range(30):
        map_GRE, planned_GR, counts_GE = routed(seed)
        topology = Topology(RANKS, RANKS, SLOTS, LINKS)
        cell = random_plan(counts_GE[None, None], topology, seed=seed, moves=4).cell(0, 0)
        columns = [CellColumns.of(cell, counts_GE, rank, SLOTS) for rank in range(RANKS)]
        received = np.stack([each.received_GS for each in columns], axis=1)
        for rank in range(RANKS):
            weights_RE = torch.rand(map_GRE[rank].shape, dtype=torch.float64).requires_grad_()
            live_RE = weights_RE * map_GRE[rank]
            all_planned = bool(planned_GR[rank].all())
            map_RC, weights_RC = columns[rank].fill(map_GRE[rank], live_RE, None if all_planned else planned_GR[rank])
            expected_RC = dealt_out(cell, counts_GE[rank], rank, map_GRE[rank], planned_GR[rank])
            assert torch.equal(map_RC, expected_RC.any(2))
            assert torch.equal(weights_RC, (expected_RC * live_RE[:, None]).sum(2))
            planned_C = map_RC[planned_GR[rank]].sum(0).numpy()
            assert np.array_equal(planned_C, columns[rank].sent_GS.ravel())
            assert np.array_equal(planned_C.reshape(RANKS, WIDTH), received[rank]), "what one sends the others expect"
            factors = torch.rand_like(weights_RC)
            (grad_RE,) = torch.autograd.grad((weights_RC * factors).sum(), weights_RE)
            assert torch.equal(grad_RE, (expected_RC * factors[..., None]).sum(1))


def dealt_out(cell, counts_E, rank, map_RE, planned_R):
    """bool [R, C, E]: row after row takes the first host of its expert that has room; unplanned rows the home."""
    taken = torch.zeros(len(map_RE), RANKS * WIDTH, EXPERTS, dtype=torch.bool)
    for expert in range(EXPERTS):
        home = int(cell.home_E[expert])
        row_at_home = int((cell.home_E[:expert] == home).sum())
        hosts = sorted(
            (int(cell.rank_R[r]) * WIDTH + EXPERTS // RANKS + int(cell.slot_R[r]), int(cell.tokens_RG[r, rank]))
            for r in np.flatnonzero(cell.expert_R == expert)
        )
        at_home = int(counts_E[expert]) - sum(tokens for _, tokens in hosts)
        room = [[home * WIDTH + row_at_home, at_home], *map(list, hosts)]
        for row in map_RE[:, expert].nonzero()[:, 0].tolist():
            host = room[0]
            if planned_R[row]:
                host = next(host for host in room if host[1])
                host[1] -= 1
            taken[row, host[0], expert] = True
    return taken


def routed(seed):
    """Maps of every rank, which of their rows are planned (every third time all), and the counts of those."""
    rng = np.random.default_rng(seed)
    scores = rng.random((RANKS, 40, EXPERTS)) + rng.random(EXPERTS)
    picked = np.argsort(-scores, axis=-1)[..., :TOP_K]
    map_GRE = np.zeros(scores.shape, bool)
    np.put_along_axis(map_GRE, picked, True, axis=-1)
    planned_GR = np.ones((RANKS, 40), bool) if seed % 3 == 0 else rng.random((RANKS, 40)) < 0.9
    counts_GE = (map_GRE & planned_GR[..., None]).sum(1)
    return torch.from_numpy(map_GRE), torch.from_numpy(planned_GR), counts_GE
