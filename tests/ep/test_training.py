"""Losses, gradients and weights after three optimizer steps are those of one process with the plain model.

The truth is the plain model in float64. What single precision may be off by hangs on the condition of three steps, and
is measured by the plain model in float32.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.trace import INDEXER
from tests.adapters.hf.model_runs import log_probs
from tests.ep import training_worker
from tests.ep.training import MICRO_STEPS, STEPS, Case, batch, decisions, policy, train_alone

QWEN, GPT, DEEPSEEK = FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
BY_HAND, DOUBLE = "by hand", torch.float64
AT_ONCE = [
    Case(QWEN, 1, "replay", "static", use_reentrant=False, missing="last"),
    Case(DEEPSEEK, 1, "live", use_reentrant=True, dtype=DOUBLE),
    Case(GPT, 2, "replay", 2, use_reentrant=True, weights="layer", dtype=DOUBLE),
    Case(DEEPSEEK, 2, "crowded", 4, use_reentrant=BY_HAND, weights="layer"),
    Case(QWEN, 2, "crowded", "planned", weights="shared", dtype=DOUBLE),
    Case(QWEN, 4, "replay", 6, missing="second", weights="layer"),
]
"""Every value of every axis."""
SLOW = [
    Case(DEEPSEEK, 2, "replay", "planned", missing="last"),
    Case(GPT, 1, "replay", "static", use_reentrant=BY_HAND, missing="last", dtype=DOUBLE),
    Case(QWEN, 1, "replay", "static", use_reentrant=BY_HAND, missing="second"),
    Case(GPT, 1, "replay"),
    Case(GPT, 2, "live", use_reentrant=BY_HAND),
    Case(GPT, 2, "crowded", use_reentrant=False, dtype=DOUBLE),
    Case(DEEPSEEK, 2, "crowded", "static", dtype=DOUBLE),
    Case(GPT, 2, "replay", "planned", use_reentrant=False, missing="second", weights="layer", dtype=DOUBLE),
    Case(QWEN, 1, "live", use_reentrant=False),
    Case(GPT, 2, "replay", 12, use_reentrant=True, missing="last", weights="shared"),
    Case(DEEPSEEK, 2, "replay", 17, missing="second", dtype=DOUBLE),
    Case(QWEN, 4, "crowded", use_reentrant=BY_HAND),
    Case(DEEPSEEK, 4, "live"),
    Case(DEEPSEEK, 4, "replay", 14, use_reentrant=False, missing="second", weights="shared", dtype=DOUBLE),
    Case(GPT, 4, "crowded", "planned", use_reentrant=True, weights="layer"),
    Case(DEEPSEEK, 4, "replay", "planned", use_reentrant=BY_HAND, missing="last", weights="shared"),
    Case(QWEN, 4, "replay", "static", use_reentrant=True, missing="second"),
    Case(GPT, 4, "replay", 16, use_reentrant=False, missing="last", weights="layer"),
    Case(GPT, 4, "crowded", 18, use_reentrant=True, weights="shared", dtype=DOUBLE),
    Case(GPT, 8, "crowded", 15, weights="shared"),
]
"""With those, every pair of values of any two axes. By night eight ranks, and all of them with the other families."""

WITH_LORA = [
    Case(QWEN, 2, "replay", 2, weights="shared", dtype=DOUBLE, lora=True),
    Case(GPT, 2, "replay", 5, use_reentrant=True, dtype=DOUBLE, lora=True),
    Case(QWEN, 4, "replay", 6, use_reentrant=False, weights="layer", dtype=DOUBLE, lora=True),
    Case(DEEPSEEK, 2, "live", dtype=DOUBLE, lora=True),
]
"""PEFT's adapters on experts, whose base is not trained."""


def sampled():
    """Give all rows with all families, each marked with when it runs."""
    for rows, marks in ((AT_ONCE, ()), (SLOW, pytest.mark.slow)):
        for row in rows:
            yield pytest.param(row, marks=pytest.mark.exhaustive if row.ranks == 8 else marks, id=row.id)
            for family in FAMILIES:
                if family != row.family:
                    other = replace(row, family=family)
                    yield pytest.param(other, marks=pytest.mark.exhaustive, id=other.id)
    for number, row in enumerate(WITH_LORA):
        yield pytest.param(row, marks=pytest.mark.slow if number else (), id=row.id)


def values_of(case):
    return {
        **vars(case),
        "plan": "drawn" if isinstance(case.plan, int) else case.plan,
    }


def may_be_together(values):
    """What needs a plan has one, which replays; replicas have a second rank; routes alone may lack rows."""
    has_replicas, has_plan = values["plan"] in ("planned", "drawn"), values["plan"] is not None
    return (
        (has_plan or not values["missing"])
        and (not has_plan or values["routing"] != "live")
        and (values["weights"] == "direct" or has_replicas)
        and (values["ranks"] > 1 or not (has_replicas or values["routing"] == "crowded"))
        and (values["routing"] == "replay" or not values["missing"])
    )


def test_every_pair_of_values_is_among_the_rows():
    rows = [values_of(row) for row in AT_ONCE + SLOW if row.ranks < 8]
    axes = {name: list(dict.fromkeys(row[name] for row in rows)) for name in rows[0]}
    assert all({values_of(row)[name] for row in AT_ONCE} == set(axes[name]) for name in axes)
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    possible = [values for values in every if may_be_together(values)]
    for one, other in itertools.combinations(axes, 2):
        wanted, found = ({(values[one], values[other]) for values in some} for some in (possible, rows))
        assert found == wanted, (one, other)


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


@pytest.mark.shows("Hugging Face", "expert parallelism with executed plans, LoRA on experts under it")
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
        if case.missing != "second":
            assert all(load.computed_L == load.planned_L for load in loads)
    assert len(outcomes[0]["loads"]) == (0 if case.plan is None else STEPS * MICRO_STEPS)


@pytest.mark.parametrize("weights", ["lost", pytest.param("doubled", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        (QWEN, False),
        pytest.param(QWEN, True, marks=pytest.mark.slow),
        *(pytest.param(each, False, marks=pytest.mark.exhaustive) for each in (GPT, DEEPSEEK)),
    ],
)
def test_the_comparison_sees_gradients_lost_or_doubled_on_their_way_home(workers, family, lora, weights):
    case = Case(family, 2, plan=5, weights=weights, lora=lora)
    truth = train_alone(replace(case.alone, dtype=torch.float64))
    allowed = errors(train_alone(case.alone), truth)
    found = errors(of_all_ranks(workers(2).run(training_worker.train, case)), truth)
    assert found["grads"] > 1000 * allowed["grads"]
    assert found["state"] > 100 * allowed["state"]


WITH_INDEXERS = [
    Case("deepseek_v32", 2, plan=4, dtype=torch.float64, use_reentrant=True),
    # the second layer follows the choice of the first
    pytest.param(Case("glm_moe_dsa", 2, plan=5, dtype=torch.float64, use_reentrant=False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", WITH_INDEXERS, ids=lambda case: case.id)
def test_training_on_choices_of_indexers_is_that_of_one_process(workers, case):
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
