"""What ranks send, receive and compute, against a simulation that follows every assignment by name."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.ep.dispatch import DispatchPlan, expand
from tests.ep.planned import split_plan
from tests.ep.transfer.plans import random_homes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.sampled_from([1, 4]), st.sampled_from([0, 1, 6]))
def test_every_assignment_reaches_a_host_of_its_expert_in_the_order_that_is_promised(seed, num_ranks, least, most):
    rng = np.random.default_rng(seed)
    counts_GE = rng.integers(0, most + 1, (num_ranks, 8))
    home_LE = random_homes(rng, 8, num_ranks)[None]
    cell = split_plan(seed, counts_GE[None, None], home_LE, slots=3).cell(0, 0)
    ranks = [DispatchPlan.of(cell, counts_GE, rank, least) for rank in range(num_ranks)]
    named = [[(e, g, i) for e in range(8) for i in range(counts_GE[g, e])] for g in range(num_ranks)]

    sent = [_taken(named[g], ranks[g].taken) for g in range(num_ranks)]
    assert [sorted(rows) for rows in sent] == named
    received = _delivered(sent, ranks)
    for rank, rows in enumerate(ranks):
        arrived = received[rank]
        computed = _taken([*arrived, *["padding"] * 8], rows.grouped, limit=len(arrived))
        groups = np.split(np.arange(len(computed)), np.cumsum(rows.group_rows_S)[:-1])
        for group, (expert, tokens_G) in zip(groups, _hosts(cell, counts_GE, rank), strict=True):
            members = [computed[i] for i in group if computed[i] != "padding"]
            assert [name[0] for name in members] == [expert] * len(members)
            assert members == sorted(members, key=lambda name: name[1:])
            assert [sum(name[1] == g for name in members) for g in range(num_ranks)] == tokens_G
            assert not members or len(group) >= least
        assert _taken(computed, rows.returned) == arrived
        assert len(computed)


def _hosts(cell, counts_GE, rank):
    """(expert, tokens from each rank) of every group of the rank: homes by id, then replicas by slot."""
    num_ranks = len(counts_GE)
    for expert in np.flatnonzero(cell.home_E == rank).tolist():
        elsewhere = [r for r in range(len(cell.expert_R)) if cell.expert_R[r] == expert]
        yield (
            expert,
            [int(counts_GE[g, expert] - sum(cell.tokens_RG[r, g] for r in elsewhere)) for g in range(num_ranks)],
        )
    here = [r for r in range(len(cell.expert_R)) if cell.rank_R[r] == rank]
    for r in sorted(here, key=lambda r: cell.slot_R[r]):
        yield int(cell.expert_R[r]), cell.tokens_RG[r].tolist()


def _taken(rows, blocks, limit=None):
    index = expand(blocks, torch.device("cpu"))
    return [rows[i] for i in (index if limit is None else index.clamp(max=limit)).tolist()]


def _delivered(sent, ranks):
    """What an all-to-all with these sizes makes of it; sizes of both ends must agree."""
    pieces = []
    for rows, rank in zip(sent, ranks, strict=True):
        ends = np.cumsum(rank.send_G)
        assert ends[-1] == len(rows)
        pieces.append([rows[end - size : end] for end, size in zip(ends, rank.send_G, strict=True)])
    for target, rank in enumerate(ranks):
        assert [len(pieces[source][target]) for source in range(len(ranks))] == rank.receive_G
    return [[row for source in range(len(ranks)) for row in pieces[source][target]] for target in range(len(ranks))]
