"""What is equal bit for bit, on the CPU: everything, to the static placement, but the gradients of split experts."""

import re
from dataclasses import replace

import pytest
import torch

import working
from foreroute.experts import compute
from training import MICRO_STEPS, Case

MODELS = (("qwen3_moe", 2), ("gpt_oss", 4), ("deepseek_v3", 2))
"""Families, and the ranks that they are spread over."""
OVER_EIGHT = ("deepseek_v3", 8)
"""A training on eight costs four times as much as one on two: one of each kind."""
UNSPLIT = [
    Case(plan="static", ahead=False),
    Case(plan="static", use_reentrant=True),
    Case(plan="static", use_reentrant=False),
    Case(plan="shuffled"),
    Case(plan="shuffled", ahead=False, use_reentrant=True),
]
SPLIT = [
    replace(case, dtype=dtype)
    for case in (Case(plan=1), Case(plan=2, use_reentrant=False), Case(plan=3, weights="shared"))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.fixture(scope="module")
def static(workers):
    """Under the static placement."""
    found = {}

    def of(case):
        plain = Case(case.family, case.ranks, plan="static", dtype=case.dtype)
        if plain not in found:
            found[plain] = workers(case.ranks).run(working.train, plain)
        return found[plain]

    return of


def on(model, case):
    family, ranks = model
    return replace(case, family=family, ranks=ranks)


@pytest.mark.parametrize(
    "case",
    [*(on(model, case) for model in MODELS for case in UNSPLIT), on(OVER_EIGHT, UNSPLIT[-2])],
    ids=lambda c: c.id,
)
def test_where_no_expert_is_split_losses_gradients_and_weights_are_equal(workers, static, case):
    outcomes = workers(case.ranks).run(working.train, case)
    for outcome, expected in zip(outcomes, static(case), strict=True):
        assert outcome["losses"] == expected["losses"]
        for kind in ("grads", "state"):
            assert [n for n, tensor in expected[kind].items() if not torch.equal(outcome[kind][n], tensor)] == []


@pytest.mark.parametrize(
    "case", [*(on(model, case) for model in MODELS for case in SPLIT), on(OVER_EIGHT, SPLIT[0])], ids=lambda c: c.id
)
def test_where_experts_are_split_all_is_equal_but_their_gradients(workers, static, case):
    outcomes = workers(case.ranks).run(working.train, case)
    differing = 0
    for outcome, expected in zip(outcomes, static(case), strict=True):
        # the first optimizer step takes up the gradients of split experts
        assert outcome["losses"][:MICRO_STEPS] == expected["losses"][:MICRO_STEPS]
        (split_LE,) = outcome["split"]
        experts = sorted({_layer(name) for name in expected["grads"] if ".experts." in name})
        for name, grad in expected["grads"].items():
            differs = (outcome["grads"][name] != grad).flatten(1 if grad.ndim > 1 else 0).any(-1)
            if ".mlp.experts." not in name:
                assert not differs.any(), name
            else:
                differing += int(differs.sum())
                assert not (differs.numpy() & ~split_LE[experts.index(_layer(name))]).any(), name
    assert differing


def _layer(name):
    return int(re.search(r"layers\.(\d+)\.", name).group(1))


def test_without_enough_rows_bits_do_differ(workers):
    """The control: the rule is needed, and the comparison sees it."""
    cases = [Case("qwen3_moe", plan=plan) for plan in ("static", "shuffled", 1, 2)]
    (expected, *others), *_ = workers(4).run(without_rule, "LEAST_ROWS", {}, cases)
    dense = [name for name in expected["grads"] if ".experts." not in name]
    assert any(not torch.equal(other["grads"][name], expected["grads"][name]) for other in others for name in dense)


def test_without_whole_vectors_bits_do_differ(monkeypatch):
    """The control of the other rule, on its own: whether a model meets it hangs on the addresses of its tensors."""
    rows = torch.randn(67, 7, generator=torch.Generator().manual_seed(0))

    def differing():
        whole = compute._rowwise(torch.sigmoid, rows)
        return sum(not torch.equal(compute._rowwise(torch.sigmoid, rows[:n]), whole[:n]) for n in range(1, 67))

    assert differing() == 0
    monkeypatch.setattr(compute, "WHOLE_VECTORS", 1)
    assert differing() > 10


def without_rule(rank, rule, value, cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, rule, value)
        return [working.train(rank, case) for case in cases]
