"""What ranks agree on: one error on all of them, and one question when all is well."""

from unittest import mock

import torch.distributed as dist

from foreroute.ep.agreement import RankConsensus
from foreroute.errors import CountsError, PlanError
from tests.ep.executor_properties import said_by


def deciding(consensus, rank, case):
    mine = case if rank else "well"
    with consensus.agree("looking", PlanError) as vote:
        if mine == "refused":
            raise CountsError(f"no counts of {rank}")
        if mine == "a builtin refusal":
            raise ValueError(f"no value of {rank}")
        if mine == "broken":
            raise ZeroDivisionError(f"broken on {rank}")
        vote.same("x" if mine != "says other things" or rank == 1 else "y", "ranks say other things ({}); say the same")
        said = "z" if not rank else "y" if (mine, rank) == ("in their group", 2) else "x"
        vote.same(said, "other things ({}) in a group", among=rank > 0)
        vote.numbers = rank, 2 * rank
    return vote.numbers_GN[:, :2].tolist()


SAID = {
    "well": ["nothing"] * 3,
    "refused": ["CountsError: looking: rank 1: no counts of 1; rank 2: no counts of 2"] * 3,
    "a builtin refusal": ["PlanError: looking: rank 1: no value of 1; rank 2: no value of 2"] * 3,
    "broken": [
        "PlanError: looking: rank 1: ZeroDivisionError('broken on 1'), whose trace is in the log of that rank; "
        "rank 2: ZeroDivisionError('broken on 2'), whose trace is in the log of that rank",
        "ZeroDivisionError: broken on 1",
        "ZeroDivisionError: broken on 2",
    ],
    "says other things": ["PlanError: ranks say other things (rank 0: x; rank 1: x; rank 2: y); say the same"] * 3,
    "in their group": ["PlanError: other things (rank 1: x; rank 2: y) in a group"] * 3,
}


def decisions(rank):
    consensus = RankConsensus(timeout_s=20)
    for case, expected in SAID.items():
        with mock.patch.object(dist, "all_gather", side_effect=dist.all_gather) as asked:
            assert said_by(deciding, consensus, rank, case) == expected[rank]
        assert asked.call_count == (1 if case == "well" else 2)
    assert deciding(consensus, rank, "well") == [[0, 0], [1, 2], [2, 4]]


def test_all_ranks_end_alike_or_go_on_behind_one_question(workers):
    workers(3).run(decisions)
