"""Which flips began a mismatch: planted swaps and a wrong router are named, healthy batches are not accused."""

from unittest import mock

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor import examine as module
from foreroute.doctor.evidence import TrainerPass
from foreroute.doctor.examine import examine
from foreroute.mismatch import root_mismatch
from tests.doctor.planted_roots import SIZES, rollout, trainer
from tests.tiers import grid
from tests.traces import random_trace

AIMS = {"bfloat16": 0.97, "fp8": 0.85}


pytestmark = pytest.mark.usefixtures("unwired")


@torch.no_grad()
def replayed(model, generation):
    """What routers would choose by themselves on the engine's routes, and the deficits."""
    routed, trace = hf.attach(model), generation.trace
    tokens = torch.from_numpy(trace.to_padded().token_ids_BT.astype(np.int64))
    with routed.replay(trace), routed.record(native=True) as recording:
        model(input_ids=tokens, use_cache=False)
    return recording.trace(), recording.deficits_NL()


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", AIMS)
def test_a_planted_swap_is_the_root_with_the_largest_deficit_of_its_sequence(precision, record_property):
    """Also where it is a near-tie by chance, as one in a hundred is."""
    first, count = 0, 0
    for depth in (4, 12, 24, 48):
        for family in SIZES:
            model = trainer(family, depth)
            generation, places = rollout(model, precision, plant=True)
            native, deficits_NL = replayed(model, generation)
            for s, place in enumerate(places):
                rows = slice(*native.offsets[s : s + 2])
                found = root_mismatch(generation.trace.select([s]), native.select([s]), deficits_NL=deficits_NL[rows])
                first += found.worst[0][1:3] == place
                count += 1
    record_property("first", f"{first} of {count}")
    assert first / count >= AIMS[precision], f"{first} of {count}"


def test_planted_swaps_are_named_with_sequence_token_layer_and_experts():
    model = trainer("qwen3_moe", 4)
    generation, places = rollout(model, "bfloat16", plant=True)
    found = diagnose(examine(model, generation))
    roots = found.measures.roots
    assert sorted((root.sequence, (root.position, root.layer)) for root in roots.far) == list(enumerate(places))
    assert found.worst is Severity.WARNING
    worst, trace = roots.far[0], generation.trace
    row = int(trace.offsets[worst.sequence]) + worst.position
    assert set(worst.engine) <= set(trace.expert_ids_NLK[row, worst.layer].tolist())
    assert set(worst.trainer).isdisjoint(trace.expert_ids_NLK[row, worst.layer].tolist())
    assert found.headline.startswith(
        f"Look at this: No near-tie: in decoder {worst.layer}, at position {worst.position} of sequence "
        f"{worst.sequence}, the engine took expert {worst.engine[0]} where the trainer takes expert {worst.trainer[0]}."
    )
    assert any(each.sentence.startswith("Something is broken. As it is, routing makes ") for each in found.findings)


@grid(("family", "depth"), [(family, depth) for family in SIZES for depth in (4, 12)], quick=0, day=3)
def test_a_router_with_noise_is_named_and_healthy_ones_are_not(family, depth):
    model, noisy = trainer(family, depth), depth // 3
    roots = diagnose(examine(model, rollout(model, "bfloat16", noisy=noisy)[0])).measures.roots
    assert [layer for layer, _ in roots.steep] == [noisy]
    for precision in AIMS:
        found = diagnose(examine(model, rollout(model, precision)[0]))
        assert (found.measures.roots.steep, found.measures.roots.far) == ([], ()), precision
        assert "No near-tie" not in str(found.findings), precision


@pytest.mark.slow
def test_roots_and_parts_cost_no_pass_and_add_up(monkeypatch):
    """An examination is a pass without replay, that pass again, one sequence at a time, and one with replay."""
    model = trainer("gpt_oss", 4)
    generation, _ = rollout(model, "fp8")
    passes = mock.Mock(wraps=module.response_logits)
    monkeypatch.setattr(module, "response_logits", passes)
    measures = diagnose(examine(model, generation)).measures
    assert passes.call_count == 1 + 1 + len(generation) + 1
    split, roots = measures.split, measures.roots
    assert split.routing + split.rest == pytest.approx(measures.without.k3, rel=1e-12)
    assert 0.3 < split.routing_share < 1
    flips = measures.routes.differing_L
    assert (roots.roots_L + roots.consequences_L >= flips).all(), "some roots are no flips of the trainer's own pass"
    assert 0 < roots.roots_L.sum() < flips.sum()
    assert roots.roots_L[0] == flips[0], "below the first router nothing was replayed"
    assert roots.consequences_L[0] == 0


@pytest.mark.parametrize(
    ("left", "wrong", "verdict"),
    [
        (0.1, {}, "Replay pays: routing makes 75% of k3"),
        (0.405, {}, "Parity would pay more than replay: routing makes nothing of k3 (-"),
        (0.1, {"expected_version": 4}, "Something is broken. As it is, routing makes 75% of k3"),
    ],
)
def test_the_parts_of_k3_say_whether_replay_pays(left, wrong, verdict):
    """Of a gap of 0.4 in every token; a trace of other weights than the trainer's comes before any verdict."""
    engine, own = (random_trace(3, route_seed=seed).with_weight_version(3) for seed in (3, 3))
    logprobs = np.linspace(-4, -2, 40)
    evidence = Evidence(
        engine=engine,
        engine_logprobs_R=logprobs,
        native=TrainerPass(own, logprobs + 0.4),
        replayed=TrainerPass(None, logprobs + left),
        **wrong,
    )
    (said,) = [each for each in diagnose(evidence).findings if "routing makes" in each.sentence]
    assert said.sentence.startswith(verdict)
    assert bool(said.advice) == ("Replay" not in verdict)
