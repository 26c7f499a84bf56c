"""Losses, gradients and weights after three optimizer steps are those of one process with the plain model.

The truth is the plain model in float64. What single precision may be off by hangs on the condition of three steps, and
is measured by the plain model in float32.
"""

from dataclasses import replace

import pytest
import torch

from tests.ep import training_worker
from tests.ep.training import MICRO_STEPS, STEPS, Case, train_alone

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
BY_DAY = [
    Case(ranks=1, plan="static"),
    Case(ranks=2, routing="live", plan=1),
    Case(ranks=2, plan=2, use_reentrant=True),
    Case(ranks=2, plan=2, use_reentrant="by hand"),
    Case(ranks=2, plan=3, unrouted=True),
    Case(ranks=2, plan=4, dtype=torch.float64),
    Case(plan=5),
    Case(plan=9, ahead=False),
    Case(plan=10, weights="layer"),
    Case(plan=11, weights="shared", use_reentrant=True),
    Case(plan="planned"),
    Case(plan=14, use_reentrant=False),
    Case(routing="crowded", plan=13),
    Case(),
]
"""Every value of every axis, but for eight ranks: each row with one family in all tests, with the next in slow ones
where there are four ranks, and with the others by night. Families alternate, so that each meets most values."""
MORE = [
    Case(ranks=1),
    Case(ranks=2, routing="live"),
    Case(ranks=2, plan=2),
    Case(ranks=2, plan=2, use_reentrant=False),
    Case(plan="static"),
    Case(routing="live", plan=7, use_reentrant=True),
    Case(routing="live", use_reentrant=False),
    Case(plan=8, unrouted=True, use_reentrant=False),
    Case(plan="planned", use_reentrant=True),
    Case(plan="planned", use_reentrant=False),
    Case(routing="crowded"),
    Case(plan=12, dtype=torch.float64, use_reentrant=False),
    Case(ranks=8, plan=13, use_reentrant=True),
    Case(ranks=8, routing="live", plan=15, weights="shared"),
]
"""With one family in slow tests, where there are four ranks or more, and with the others by night."""


def sampled():
    """Give all rows with all families, each marked with when it runs."""
    for rows, by_day in ((BY_DAY, [()]), (MORE, [])):
        for number, row in enumerate(rows):
            seldom = pytest.mark.slow if row.ranks >= 4 else pytest.mark.exhaustive
            for turn, marks in enumerate([*by_day, seldom, pytest.mark.exhaustive, pytest.mark.exhaustive][:3]):
                case = replace(row, family=FAMILIES[(number + turn) % 3])
                yield pytest.param(case, marks=marks, id=case.id)


DRAWS = 3
"""Of the plain model's roundings: a single one may happen to be near the truth. The largest of three draws of all
losses, or of all tensors, is beyond the standard deviation of one, and four times that is not reached by chance."""


def errors(outcome, truth):
    """Relative, the largest of any tensor: of losses, gradients, weights."""
    return {
        "losses": float((outcome["losses"] - truth["losses"]).abs().max() / truth["losses"].abs().max()),
        **{kind: max(map(float, relative(outcome[kind], truth[kind]))) for kind in ("grads", "state")},
    }


def relative(tensors, truth):
    assert tensors.keys() == truth.keys()
    for name, true in truth.items():
        scale = true.double().norm()
        yield (tensors[name].double() - true.double()).norm() / (scale if scale else 1.0)


def of_all_ranks(outcomes):
    """As `train_alone` has it: losses by step, micro-step and rank."""
    losses = torch.tensor([outcome["losses"] for outcome in outcomes], dtype=torch.float64).T.flatten()
    return {**outcomes[0], "losses": losses}


@pytest.mark.parametrize("case", list(sampled()))
def test_training_is_that_of_one_process(workers, case):
    outcomes = workers(case.ranks).run(training_worker.train, case)
    truth = train_alone(replace(case.alone, dtype=torch.float64))
    if case.dtype == torch.float64:
        allowed = dict.fromkeys(("losses", "grads", "state"), 1e-13)
    else:
        drawn = [errors(train_alone(case.alone, draw), truth) for draw in range(DRAWS)]
        allowed = {kind: 4 * max(each[kind] for each in drawn) for kind in drawn[0]}
    found = errors(of_all_ranks(outcomes), truth)
    assert all(found[kind] <= allowed[kind] for kind in found), (found, allowed)
    for outcome in outcomes[1:]:
        assert all(torch.equal(outcome["state"][name], whole) for name, whole in outcomes[0]["state"].items())
    for loads in zip(*(outcome["loads"] for outcome in outcomes), strict=True):
        assert {sum(computed) for computed in zip(*(load.computed_L for load in loads), strict=True)} == {
            sum(load.sent for load in loads)
        }
        assert all(load.executed_L == load.computed_L for load in loads)
        if not case.unrouted:
            assert all(load.computed_L == load.planned_L for load in loads)
    assert len(outcomes[0]["loads"]) == (0 if case.plan is None else STEPS * MICRO_STEPS)


@pytest.mark.parametrize("weights", ["lost", "doubled"])
@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[1:])]
)
def test_the_comparison_sees_gradients_lost_or_doubled_on_their_way_home(workers, family, weights):
    case = Case(family, 4, plan=5, weights=weights)
    truth = train_alone(replace(case.alone, dtype=torch.float64))
    allowed = errors(train_alone(case.alone), truth)
    found = errors(of_all_ranks(workers(4).run(training_worker.train, case)), truth)
    assert found["grads"] > 1000 * allowed["grads"]
    assert found["state"] > 100 * allowed["state"]
