"""Counts known ahead: what the dispatcher no longer asks for and waits for; and plans of other counts or ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher

from foreroute.adapters.megatron.recording import gather_objects
from foreroute.ep import execution as executions
from foreroute.ep.agreement import RankConsensus
from foreroute.errors import CountsError, PlanError
from tests.adapters.megatron.executed_plans import Planned, make_plan, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.ep.asking import asking

MICRO_BATCHES, LAYERS = 2, 2


@pytest.mark.slow
@on_ranks(2)
def test_exchanges_and_waits():
    """One exchange of counts and one wait of the host per layer and forward before, two with recomputation; then none.

    Rows without a route make the counts of their micro-step unknown, and they are exchanged in every cell.
    """
    cells = MICRO_BATCHES * LAYERS
    for recompute, complete, planned, expected in (
        ("none", True, None, cells),
        ("none", True, "planned", 0),
        ("none", False, "planned", cells),
        ("selective", True, None, 2 * cells),
        ("selective", True, "planned", 0),
    ):
        case = ExecutionCase(Cell(ep=2, layers=LAYERS, recompute=recompute), complete=complete)
        exchanges, waits = counted(case, planned)
        assert exchanges == expected, (recompute, complete, planned, exchanges)
        assert (waits > 0) == (planned is None), (recompute, complete, planned, waits)


def counted(case, planned):
    """(exchanges of counts, waits of the host for the device in Megatron's dispatchers) in a run."""
    with (
        mock.patch.object(
            token_dispatcher,
            "gather_from_sequence_parallel_region",
            side_effect=token_dispatcher.gather_from_sequence_parallel_region,
        ) as gathers,
        mock.patch.object(executions, "gather_counts", side_effect=executions.gather_counts) as ours,
        mock.patch.object(type(torch.cuda.current_stream()), "synchronize") as waits,
    ):
        trained(case, planned, steps=1)
    return gathers.call_count + ours.call_count, waits.call_count


@on_ranks(2)
def test_ranks_ask_each_other_when_a_schedule_begins_and_ends():
    require_asked_once(Planned.of(ExecutionCase(Cell(ep=2, layers=LAYERS)), "momentum"))


def require_asked_once(at):
    """On entering a second execution, and on leaving it. Within the schedule nothing is asked of ours."""
    with at.execute():
        at.step()
    with mock.patch.object(RankConsensus, "gather", autospec=True, side_effect=RankConsensus.gather) as votes:
        with asking() as asked, at.execute():
            assert (len(asked), votes.call_count) == (1, 1)
            at.step()
            assert votes.call_count == 1
            asked.clear()
        assert (len(asked), votes.call_count) == (1, 2)


@pytest.mark.slow
@on_ranks(4)
def test_ranks_of_all_stages_ask_each_other_at_once_and_what_one_objects_to_ends_all():
    """Other plans, which expert-parallel ranks agree on, or all but one; other micro-batches: one error everywhere."""
    at = Planned.of(ExecutionCase(Cell(ep=2, pp=2, layers=LAYERS), 4), "momentum")
    require_asked_once(at)
    routed, shards, counts_MLGE = at.routed, at.shards, at.counts_MLGE
    other = make_plan(routed, None, "static", 0, shards, None)[0]

    def execute(plan=at.plan, announced=shards):
        with routed.execute(plan, counts_MLGE, announced):
            pass

    plans = r"ranks hold different plans \(rank 0: step \d, plan .*; rank 3: "
    backwards = "rank 3: micro-batch 0 makes"
    for ranks, error, match, right, wrong in (
        ({2, 3}, PlanError, plans, execute, lambda: execute(other)),
        ({3}, PlanError, plans, execute, lambda: execute(other)),
        ({3}, CountsError, backwards, execute, lambda: execute(announced=shards[::-1])),
        (
            {2, 3},
            CountsError,
            r"ranks have other micro-batches .*rank 1: 3 micro-batches; rank 2: 2 micro-batches",
            lambda: routed.gather_counts(shards),
            lambda: routed.gather_counts(shards[:2]),
        ),
    ):
        with pytest.raises(error, match=match) as caught:
            (wrong if dist.get_rank() in ranks else right)()
        said = gather_objects(str(caught.value), dist.group.WORLD)
        assert len(set(said)) == 1, said
    with at.execute():
        at.step()
