"""Weights at given ids without hooks. tests/adapters/hf/family_checks.py holds routers of transformers against it."""

import pytest
import torch

from foreroute.core import DeferredChecks, ReplayError, select_at
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import same_bits

RULES = {
    "Qwen3-MoE": {"normalize": True},
    "OLMoE": {},
    "gpt-oss": {"gate": "softmax of picks"},
    "DeepSeek-V2": {"groups": (4, 2, 1), "scale": 16.0},
    "DeepSeek-V3": {"gate": "sigmoid", "groups": (4, 2, 2), "normalize": True, "scale": 2.5},
    "LFM2": {"gate": "sigmoid", "normalize": True, "epsilon": 1e-6},
    "Kolibri": {"gate": "sigmoid of picks"},
    "DeepSeek-V4": {"gate": "scores", "normalize": True, "scale": 1.5},
}
BIAS = torch.linspace(-0.4, 0.4, 8)
FAULTS = {"id out.*range": [3, 8, 1], "expert twice": [3, 1, 3], "-1 beside experts": [3, -1, 1]}


def drawn(dtype=torch.float32):
    """Logits [2, 5, 8] and routes [2, 5, 3] of all rows but one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(2, 5, 8, generator=generator).argsort(-1)[..., :3]
    ids[1, 2] = -1
    return torch.rand(2, 5, 8, generator=generator, dtype=dtype) * 4, ids


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_formula(rule):
    logits, ids = drawn(torch.float64)
    given = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: select_at(logits, ids, bias=BIAS, **RULES[rule])[0], given)


@pytest.mark.slow
def test_one_graph_takes_it():
    for rule in (RULES["gpt-oss"], RULES["DeepSeek-V3"]):
        call = torch.compile(
            lambda *args, rule=rule: select_at(*args, bias=BIAS, **rule), backend="aot_eager", fullgraph=True
        )
        logits, ids = drawn()
        ids[0, 1] = torch.tensor(FAULTS["expert twice"])
        given = [logits.clone().requires_grad_() for _ in range(2)]
        weights, chosen = zip(call(given[0], ids), select_at(given[1], ids, bias=BIAS, **rule), strict=True)
        assert torch.equal(*chosen)
        torch.testing.assert_close(*weights, equal_nan=True, rtol=1e-6, atol=0)
        for each in weights:
            each.nansum().backward()
        torch.testing.assert_close(*(each.grad for each in given), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_a_route_are_the_routers_and_others_keep_their_order(rule):
    logits, ids = drawn()
    weights, chosen = select_at(logits, ids.to(torch.uint8), bias=BIAS, **RULES[rule])  # -1 is 255 there
    native, native_ids = select_at(logits, torch.full_like(ids, -1), bias=BIAS, **RULES[rule])
    given = (ids >= 0).all(-1)
    assert torch.equal(chosen, torch.where(given[..., None], ids, native_ids))
    assert same_bits(weights[~given], native[~given])
    assert same_bits(select_at(logits, native_ids, **RULES[rule])[0], native)  # a bias and groups weigh nothing
    assert not torch.equal(weights[given], native[given])


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_ids_are_told(fault):
    logits, ids = drawn()
    right, chosen = select_at(logits, ids, checks=DeferredChecks())
    ids[0, 1] = torch.tensor(FAULTS[fault])
    weights, others = select_at(logits, ids)  # nobody is asked: the loss tells
    assert weights[0, 1].isnan().all()
    assert torch.equal(others[0, 1], logits[0, 1].topk(3).indices)
    is_other = torch.ones(2, 5, dtype=torch.bool)
    is_other[0, 1] = False
    assert same_bits(weights[is_other], right[is_other])
    assert torch.equal(others[is_other], chosen[is_other])
    with pytest.raises(ReplayError, match=rf"1 rows with.*{fault}; .*NaN"):
        select_at(logits, ids, checks=DeferredChecks())


def test_the_host_does_not_wait_and_is_told_before_a_step():
    logits, ids = drawn()
    ids[0, 1] = torch.tensor(FAULTS["expert twice"])
    checks, weight = DeferredChecks(), torch.nn.Parameter(torch.ones(1))
    with other_device() as device:
        *there, bias = (each.to(DEVICE) for each in (logits, ids, BIAS))
        device.reads.clear()
        for rule in RULES.values():
            weights, _ = select_at(*there, bias=bias, checks=checks, **rule)
        assert not device.reads
        weights.cpu()
        assert device.reads  # the control: a wait is counted
        with pytest.raises(ReplayError, match="twice"):
            torch.optim.SGD([weight]).step()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": torch.zeros(2, 4, 3, dtype=torch.int64)}, r"ids torch.int64 of shape \[2, 4, 3\]"),
        ({"ids": torch.zeros(2, 5, 9, dtype=torch.int64)}, r"ids torch.int64 of shape \[2, 5, 9\].*K <= E"),
        ({"bias": torch.zeros(5, 1)}, r"bias torch\.float32.*\[5, 1\]"),
        ({"groups": (4, 1, 1)}, r"groups \(4, 1, 1\)"),  # of 2 experts
        ({"gate": "tanh"}, r"gate.*'tanh'; expected.*'softmax of"),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    logits, ids = drawn()
    with pytest.raises(ReplayError, match=said):
        select_at(**{"scores": logits, "ids": ids, **change})
