"""Counts known ahead: what the dispatcher no longer asks for and waits for; and plans of other counts or ranks."""

import pytest
import torch.distributed as dist

from foreroute.adapters.megatron.recording import gather_objects
from foreroute.errors import CountsError, PlanError
from tests.adapters.megatron.executed_plans import Planned, make_plan
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase


@pytest.mark.slow
@on_ranks(4)
def test_ranks_of_all_stages_ask_each_other_at_once_and_what_one_objects_to_ends_all():
    """Other plans, which expert-parallel ranks agree on, or all but one; other micro-batches: one error everywhere."""
    at = Planned.of(ExecutionCase(Cell(ep=2, pp=2, layers=2), 4), "momentum")
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
