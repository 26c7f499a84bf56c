"""What ranks send, receive, compute and copy, against simulations that follow every assignment and expert by name."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.ep.dispatch import expand_segments
from foreroute.errors import PlanError
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule
from tests.ep.transfer.plans import no_tokens, random_plan, split_plan
from tests.plan.random_plans import changed


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 6]))
def test_every_assignment_reaches_a_host_of_its_expert_in_the_order_that_is_promised(seed, num_ranks, most):
    rng = np.random.default_rng(seed)
    counts_GE = rng.integers(0, most + 1, (num_ranks, 8))
    home_LE = rng.permutation(np.arange(8) % num_ranks).astype(np.int16)[None]
    plan = split_plan(seed, counts_GE[None, None], home_LE, slots=3)
    cell = plan.cell(0, 0)
    ranks = [CellSchedule.of(cell, counts_GE, rank) for rank in range(num_ranks)]
    for rank, alone in enumerate(ranks):
        whole = ExecutionSchedule(plan, counts_GE[None, None], rank).cell(0, 0)
        assert all(np.array_equal(a, b) for a, b in zip(vars(whole).values(), vars(alone).values(), strict=True))
    named = [[(e, g, i) for e in range(8) for i in range(counts_GE[g, e])] for g in range(num_ranks)]

    sent = [_taken(named[g], ranks[g].send_segments) for g in range(num_ranks)]
    assert [sorted(rows) for rows in sent] == named
    received = _delivered(sent, ranks)
    for rank, rows in enumerate(ranks):
        arrived = received[rank]
        computed = _taken([*arrived, "padding"], rows.expert_segments)
        groups = np.split(np.arange(len(computed)), np.cumsum(rows.group_rows_S)[:-1])
        for group, (expert, tokens_G) in zip(groups, _hosts(cell, counts_GE, rank), strict=True):
            members = [computed[i] for i in group if computed[i] != "padding"]
            assert [name[0] for name in members] == [expert] * len(members)
            assert members == sorted(members, key=lambda name: name[1:])
            assert [sum(name[1] == g for name in members) for g in range(num_ranks)] == tokens_G
        assert _taken(computed, rows.return_segments) == arrived
        num_home_rows = rows.group_rows_S[: rows.num_home].sum()
        parts = [computed[:num_home_rows], computed[num_home_rows:]]
        for part in parts[: 1 + (len(rows.group_rows_S) > rows.num_home)]:
            assert part == ["padding"] or (part and "padding" not in part)


def _hosts(cell, counts_GE, rank):
    """(expert, tokens from each rank) of every group of the rank: homes by id, then replicas by slot."""
    num_ranks = len(counts_GE)
    for expert in np.flatnonzero(cell.home_E == rank).tolist():
        elsewhere = np.flatnonzero(cell.expert_R == expert)
        yield expert, [int(counts_GE[g, expert] - sum(cell.tokens_RG[elsewhere, g])) for g in range(num_ranks)]
    for r in sorted(np.flatnonzero(cell.rank_R == rank), key=lambda r: cell.slot_R[r]):
        yield int(cell.expert_R[r]), cell.tokens_RG[r].tolist()


def _taken(rows, blocks):
    index = expand_segments([blocks], [int(blocks[:, 1].sum())], torch.device("cpu"))[0]
    return [rows[i] for i in index.tolist()]


def _delivered(sent, ranks):
    """What an all-to-all with these sizes makes of it; sizes of both ends must agree."""
    pieces = []
    for rows, rank in zip(sent, ranks, strict=True):
        ends = np.cumsum(rank.send_G)
        assert ends[-1] == len(rows)
        pieces.append([rows[end - size : end] for end, size in zip(ends, rank.send_G, strict=True)])
    for target, rank in enumerate(ranks):
        assert [len(pieces[source][target]) for source in range(len(ranks))] == rank.receive_G.tolist()
    return [[row for source in range(len(ranks)) for row in pieces[source][target]] for target in range(len(ranks))]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=60)
def test_replicas_are_fetched_from_home_and_their_gradients_return_to_it(seed, ranks, per_rank):
    plan = random_plan(seed, ranks=ranks, experts=ranks * per_rank, slots=3, micro_steps=2, layers=2)
    schedules = [ExecutionSchedule(plan, no_tokens(plan), rank) for rank in range(ranks)]
    for m, layer in itertools.product(range(2), range(2)):
        cell, cells = plan.cell(m, layer), [schedule.cell(m, layer) for schedule in schedules]
        shards = [np.flatnonzero(cell.home_E == rank).tolist() for rank in range(ranks)]
        sends = {(r["number"], g): r for g in range(ranks) for r in cells[g].sends}
        assert len(sends) == len(cell.expert_R)
        busiest = max(len(table) for own in cells for table in (own.sends, own.hosted))
        assert {move["round"] for move in sends.values()} == set(range(busiest))  # as few rounds as can be
        for rank, own in enumerate(cells):
            here = sorted(zip(cell.slot_R.tolist(), cell.expert_R.tolist(), cell.rank_R == rank, strict=True))
            wanted = [(slot, expert) for slot, expert, is_here in here if is_here]
            by_place = own.hosted[np.argsort(own.hosted["position"])]
            assert by_place["position"].tolist() == list(range(len(wanted)))
            assert list(zip(by_place["slot"].tolist(), by_place["expert"].tolist(), strict=True)) == wanted
            for move in own.hosted:
                assert shards[move["peer"]][move["row"]] == move["expert"]
                other = sends[move["number"], move["peer"]]  # the same move, seen from its other end
                assert all(other[name] == move[name] for name in ("round", "expert", "row", "slot"))
                assert other["peer"] == rank
            # gradients are added in order of (row, rank of the replica)
            arrivals = own.sends[np.argsort(own.sends["position"])]
            assert arrivals["position"].tolist() == list(range(len(arrivals)))
            order = list(zip(arrivals["row"].tolist(), arrivals["peer"].tolist(), strict=True))
            assert order == sorted(order)
            for table in (own.sends, own.hosted):
                assert sorted(table["round"].tolist()) == table["round"].tolist()
                assert len(set(table["round"].tolist())) == len(table)


def test_replicas_that_are_to_serve_more_than_there_is_are_refused_on_every_rank():
    counts_MLGE = np.full((1, 2, 4, 8), 2)
    plan = split_plan(0, counts_MLGE, np.stack([np.arange(8) % 4] * 2).astype(np.int16), slots=2)
    cell = plan.cell(0, 1)
    replica, source = np.argwhere(cell.tokens_RG)[0].tolist()
    counts_MLGE[0, 1, source, cell.expert_R[replica]] = 0
    for rank in range(4):
        with pytest.raises(PlanError, match=rf"layer 1: .* expert {cell.expert_R[replica]} .*serve \d"):
            ExecutionSchedule(plan, counts_MLGE, rank).cell(0, 0)


NOT_THERE = {
    "an expert": ("expert_R", 8),
    "a rank below 0": ("rank_R", -1),
    "one slot": ("slot_R", 0),
    "a home": ("home_LE", 4),
    "one rank": ("home_LE", 0),
    "offsets": ("offsets", 99),
}


@pytest.mark.parametrize("what", [*NOT_THERE, "sources", "experts"])
def test_what_is_not_there_is_refused_before_memory_is_indexed_by_it(what):
    """Plans that were made by hand, and so never checked."""
    counts_MLGE = np.full((1, 2, 4, 8), 2)
    plan = split_plan(0, counts_MLGE, np.stack([np.arange(8) % 4] * 2).astype(np.int16), slots=2)
    counts_MLGE = {"sources": counts_MLGE[:, :, :2], "experts": counts_MLGE[..., :4]}.get(what, counts_MLGE)
    if what in NOT_THERE:
        name, value = NOT_THERE[what]
        plan = changed(plan, name, slice(name == "offsets", None), value)
    named = {"sources": "tokens_RG", "experts": "home_LE"}.get(what) or NOT_THERE[what][0]
    with pytest.raises(PlanError, match=rf"layer 0: .*{named}.*not there.*verify"):
        ExecutionSchedule(plan, counts_MLGE, 0).cell(0, 0)
