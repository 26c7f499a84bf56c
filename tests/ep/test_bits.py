"""What is equal bit for bit, on the CPU: everything, to the static placement, but the gradients of split experts."""

import re
from dataclasses import replace

import pytest
import torch

from foreroute.ep import compute
from tests.ep import training_worker
from tests.ep.training import MICRO_STEPS, Case

MODELS = (("qwen3_moe", 2), ("gpt_oss", 4), ("deepseek_v3", 8))
"""Families, and the ranks that they are spread over."""
UNSPLIT = [
    Case(plan="static", ahead=False),
    Case(plan="static", use_reentrant=True),
    Case(plan="static", use_reentrant=False),
    Case(plan="shuffled"),
    Case(plan="shuffled", ahead=False, use_reentrant=True),
]
SPLIT = [Case(plan=1), Case(plan=2, use_reentrant=False), Case(plan=3, weights="shared")]


@pytest.fixture(scope="module")
def static(workers):
    """Under the static placement."""
    found = {}

    def of(family, ranks, dtype):
        if (family, dtype) not in found:
            found[family, dtype] = workers(ranks).run(
                training_worker.train, Case(family, ranks, plan="static", dtype=dtype)
            )
        return found[family, dtype]

    return of


@pytest.mark.parametrize("case", UNSPLIT, ids=lambda case: case.id)
@pytest.mark.parametrize(("family", "ranks"), MODELS)
def test_where_no_expert_is_split_losses_gradients_and_weights_are_equal(workers, static, family, ranks, case):
    outcomes = workers(ranks).run(training_worker.train, replace(case, family=family, ranks=ranks))
    for outcome, expected in zip(outcomes, static(family, ranks, torch.float32), strict=True):
        assert outcome["losses"] == expected["losses"]
        for kind in ("grads", "state"):
            assert [n for n, tensor in expected[kind].items() if not torch.equal(outcome[kind][n], tensor)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.id)
@pytest.mark.parametrize(("family", "ranks"), MODELS)
def test_where_experts_are_split_all_is_equal_but_their_gradients(workers, static, family, ranks, case, dtype):
    outcomes = workers(ranks).run(training_worker.train, replace(case, family=family, ranks=ranks, dtype=dtype))
    differing = 0
    for outcome, expected in zip(outcomes, static(family, ranks, dtype), strict=True):
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

    def sigmoid(n):
        return compute.Activate.apply(rows[:n], torch.ones(n, 1), torch.sigmoid)

    def differing():
        return sum(not torch.equal(sigmoid(n), sigmoid(67)[:n]) for n in range(1, 67))

    assert differing() == 0
    monkeypatch.setattr(compute, "WHOLE_VECTORS", 1)
    assert differing() > 10


def without_rule(rank, rule, value, cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, rule, value)
        return [training_worker.train(rank, case) for case in cases]
