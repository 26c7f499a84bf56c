"""Where a mismatch begins: planted swaps and a wrong router are named, and healthy batches are not accused."""

import numpy as np
import pytest

from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.doctor.examine import examine
from tests.doctor.planted_roots import SIZES, rollout, trainer
from tests.tiers import grid
from tests.traces import random_trace

pytestmark = pytest.mark.usefixtures("unwired")


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


@grid(("family", "depth"), [(family, depth) for family in SIZES for depth in (4, 12)], quick=0, day=2)
def test_a_router_with_noise_is_named_and_healthy_ones_are_not(family, depth):
    model, noisy = trainer(family, depth), depth // 3
    found = diagnose(examine(model, rollout(model, "bfloat16", noisy=noisy)[0]))
    assert [layer for layer, _ in found.measures.roots.steep] == [noisy]
    assert any(f"router of decoder {noisy} is not the engine's" in each.sentence for each in found.findings)
    for precision in ("bfloat16", "fp8"):
        found = diagnose(examine(model, rollout(model, precision)[0]))
        assert (found.measures.roots.steep, found.measures.roots.far) == ([], ()), precision
        assert "No near-tie" not in str(found.findings), precision


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
