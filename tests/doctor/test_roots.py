"""What carries a mismatch: planted swaps and a wrong router are named; shares are those of replays of some routes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute import core
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.doctor.examine import examine
from foreroute.doctor.explain import explain
from foreroute.mismatch.attribution import k3_weights
from foreroute.report.diagnosis import root_table
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
    table = root_table(found.measures)
    shown = zip(table.column("Sequence"), table.column("Position"), table.column("Engine took"), strict=True)
    assert list(shown) == [(str(r.sequence), str(r.position), ", ".join(map(str, r.engine))) for r in roots.far]


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


class Replays:
    """Log-probs [B, T - 1] of a model on the engine's routes in chosen cells, and on its own elsewhere."""

    def __init__(self, model, generation, evidence):
        self.model, trace = model, generation.trace
        self.routed = core.attach(model)
        self.tokens = torch.from_numpy(trace.to_padded().token_ids_BT.astype(np.int64))
        pads = [each.to_padded().expert_ids_BTLK[:, :-1] for each in (evidence.native.executed, trace)]
        self.native, self.engine = map(torch.from_numpy, pads)

    @torch.no_grad()
    def __call__(self, cells_BTL):
        with self.routed.replay(torch.where(cells_BTL[..., None], self.engine, self.native)):
            logits = self.model(input_ids=self.tokens[:, :-1], use_cache=False).logits
        picked = logits.log_softmax(-1).gather(-1, self.tokens[:, 1:, None])[..., 0]
        return picked.double().numpy()

    def cells(self):
        return torch.zeros(self.engine.shape[:3], dtype=torch.bool)


@grid(("family", "precision"), [(f, p) for p in ("bfloat16", "fp8") for f in SIZES], quick=1, day=2)
def test_layers_flips_and_tokens_are_those_of_exact_replays(family, precision):
    """By layer from below, one after the other; of tokens, their own flips alone, and one flip alone."""
    model = trainer(family, 4)
    generation, _ = rollout(model, precision)
    evidence = examine(model, generation)
    found = explain(model, generation, evidence)
    replays = Replays(model, generation, evidence)
    gap = (replays(replays.cells()).reshape(-1) - generation.logprobs_R).reshape(len(generation), -1)
    weights = k3_weights(gap)
    path = [replays(replays.cells())]
    for layer in range(4):
        cells = replays.cells()
        cells[..., : layer + 1] = True
        path.append(replays(cells))
    exact_L = np.array([(weights * (one - other)).mean() for one, other in itertools.pairwise(path)])
    assert found.routing == pytest.approx(exact_L.sum(), rel=1e-3)
    assert found.k3 == pytest.approx((np.expm1(gap) - gap).mean(), rel=1e-3)
    assert found.error <= 0.03
    assert found.carried_L.sum() == pytest.approx(exact_L.sum(), rel=0.03)
    assert np.abs(found.carried_L - exact_L).sum() <= 0.1 * np.abs(exact_L).sum()
    assert len(found.tokens) == len(found.worst) == len(generation) // 4
    for token in found.tokens:
        alone, one = replays.cells(), replays.cells()
        alone[token.sequence, token.position - 1] = True
        one[token.sequence, token.flip[0], token.flip[1]] = True
        at = token.sequence, token.position - 1
        assert token.routing == pytest.approx(path[0][at] - path[-1][at], abs=1e-4)
        assert token.own == pytest.approx(path[0][at] - replays(alone)[at], abs=1e-4)
        assert token.of_flip == pytest.approx(path[0][at] - replays(one)[at], abs=1e-4)
        assert token.flip[0] < token.position
    assert found.own_share is not None
    assert found.forwards <= 4
    assert found.backwards == 2

    diagnosis = diagnose(replace(evidence, attribution=found))
    said = [each.sentence for each in diagnosis.findings if each.topic == "gap"]
    assert len(said) == 3
    assert f"carry the most of routing's part of k3, {found.carried_L.max():.2e} of" in said[0]


@pytest.mark.slow
def test_a_model_is_left_as_it_was_and_micro_steps_add_up():
    model = trainer("qwen3_moe", 4)
    generation, _ = rollout(model, "bfloat16")
    evidence = examine(model, generation)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, parts = explain(model, generation, evidence), explain(model, generation, evidence, micro_step_tokens=100)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert parts.carried_L == pytest.approx(whole.carried_L, rel=1e-2, abs=1e-8)
    assert [token.sequence for token in parts.tokens] == [token.sequence for token in whole.tokens]
