"""What a reader prints while looking around is one short line of figures."""

import re

import numpy as np
import pytest

import foreroute as fr
from foreroute.adapters import hf
from foreroute.core import attach
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, random_routes
from tests.plan.random_plans import small_case

TRAIN, INFER = (np.log(each) for each in ([0.50, 0.40, 0.20, 0.10], [0.50, 0.44, 0.19, 0.30]))
ENGINE, TRAINER = np.array([[[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]], [[[[1, 0], [2, 4]], [[4, 5], [6, 7]]]]])
SPEC = "RoutingSpec(qwen3_moe, 3 layers (decoder 0 to decoder 2), top-2 of 8)"
LINES = {
    "tokens": (lambda: token_mismatch(TRAIN, INFER), "TokenMismatch(k3 0.109, F(1.5) 25.00%, F(2) 25.00%, 4 tokens)"),
    "no tokens": (lambda: token_mismatch([], []), "TokenMismatch(k3 nan, F(1.5) nan%, F(2) nan%, 0 tokens)"),
    "routes": (
        lambda: routing_mismatch(ENGINE, TRAINER),
        "RoutingMismatch(25.00% of (token, layer), 50.00% of tokens, 2 rows of 2 layers)",
    ),
    "plan": (
        lambda: small_case(moves=2)[0],
        "StepPlan(3 micro-steps of 2 layers, 8 experts on 4 ranks, # replicas, # moved homes)",
    ),
    "model": (lambda: hf.attach(tiny("qwen3_moe")), f"RoutedTransformer({SPEC})"),
    "tensors": (
        lambda: attach(tiny("qwen3_moe")),
        "Routed(3 routers from model.layers.0.mlp.gate to model.layers.2.mlp.gate)",
    ),
}


@pytest.mark.parametrize(("make", "line"), LINES.values(), ids=LINES)
def test_it_is_one_line(make, line):
    shown = re.sub(r"\d+(?= replicas| moved)", "#", repr(make()))
    assert shown == line


def test_a_diagnosis_prints_its_headline():
    found = fr.compare(TRAIN, INFER).diagnosis
    assert str(found) == found.headline
    assert repr(found) == f"Diagnosis({found.headline!r}, {len(found.findings)} findings)"


def test_a_model_that_is_replaying_says_so():
    model = tiny("qwen3_moe")
    routed, batch = hf.attach(model), batch_of(4, 3)
    with routed.replay(random_routes(routed.spec, batch)):
        model(**batch)
        assert repr(routed) == f"RoutedTransformer({SPEC}, replaying)"
