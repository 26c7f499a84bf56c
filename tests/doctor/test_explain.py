"""An explained gap, beside exact replays of parts of the engine's routes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute import core
from foreroute.doctor import diagnose
from foreroute.doctor.attribution import Attribution, SequenceFlips, WorstToken, sentences
from foreroute.doctor.examine import examine
from foreroute.doctor.explain import explain
from foreroute.errors import ReplayError
from foreroute.mismatch.attribution import k3_weights
from foreroute.report import write_diagnosis
from foreroute.trace import RoutedLayer
from tests.doctor.planted_roots import SIZES, rollout, trainer
from tests.report.pages import text_of
from tests.tiers import grid

pytestmark = pytest.mark.usefixtures("unwired")


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


@grid(("family", "precision"), [(f, p) for p in ("bfloat16", "fp8") for f in SIZES], quick=1, day=3)
def test_layers_flips_and_tokens_are_those_of_exact_replays(family, precision, tmp_path):
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
    text = text_of(write_diagnosis(diagnosis, tmp_path / "page.html").read_text())
    assert all(each in text for each in said)
    assert f"This took {found.forwards:.1f} forwards and 2 backwards" in text


@pytest.mark.slow
def test_text_of_tools_between_sampled_tokens_moves_no_position():
    model = trainer("qwen3_moe", 4)
    whole, _ = rollout(model, "bfloat16", sequences=4)
    sampled_N = whole.sampled_N.copy()
    for s, first in enumerate(whole.prompt_lengths):
        sampled_N[whole.trace.offsets[s] + first + 3 : whole.trace.offsets[s + 1] - 8] = False
    generation = replace(whole, sampled_N=sampled_N, logprobs_R=whole.logprobs_R[sampled_N[whole.sampled_N]])
    evidence = examine(model, generation)
    found = explain(model, generation, evidence)
    replays = Replays(model, generation, evidence)
    native, replayed = replays(replays.cells()), replays(~replays.cells())
    for token in found.tokens:
        at = token.sequence, token.position - 1
        assert sampled_N[whole.trace.offsets[token.sequence] + token.position]
        assert token.routing == pytest.approx(native[at] - replayed[at], abs=1e-4)


@pytest.mark.exhaustive
def test_the_first_order_is_near_and_cheap_in_deep_models_too():
    """Three in a hundred off the exact sums of sequences on average, and four forwards at most."""
    errors = []
    for depth, family, precision in itertools.product((12, 24, 48), SIZES, ("bfloat16", "fp8")):
        model = trainer(family, depth)
        generation, _ = rollout(model, precision)
        found = explain(model, generation, examine(model, generation))
        assert found.forwards <= 4, (depth, family, precision)
        errors.append(found.error)
    assert np.mean(errors) <= 0.03
    assert max(errors) <= 0.035


@pytest.mark.usefixtures("unpainted")
def test_an_engine_that_agrees_and_responses_of_no_token_are_no_gap(tmp_path):
    model = trainer("qwen3_moe", 4)
    generation, _ = rollout(model, "float32", sequences=4)
    evidence = examine(model, generation)
    alike = replace(evidence, engine_logprobs_R=evidence.native.logprobs_R)
    found = explain(model, replace(generation, logprobs_R=evidence.native.logprobs_R), alike)
    assert abs(found.k3) < 1e-9
    diagnosis = diagnose(replace(alike, attribution=found))
    assert not [each for each in diagnosis.findings if each.topic == "gap"]
    write_diagnosis(diagnosis, tmp_path / "page.html")
    none = replace(alike, engine_logprobs_R=np.zeros(0))
    with pytest.raises(ReplayError, match="response token"):
        explain(model, generation, none)


@pytest.mark.slow
def test_a_model_is_left_as_it_was_and_micro_steps_add_up(monkeypatch):
    model = trainer("qwen3_moe", 4)
    generation, _ = rollout(model, "bfloat16")
    evidence = examine(model, generation)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, parts = explain(model, generation, evidence), explain(model, generation, evidence, micro_step_tokens=100)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert parts.carried_L == pytest.approx(whole.carried_L, rel=1e-2, abs=1e-8)
    assert [token.sequence for token in parts.tokens] == [token.sequence for token in whole.tokens]
    block = model.model.layers[2].mlp
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda hidden: forward(hidden) * (1.1 if hidden.shape[1] < 20 else 1.0))
    with pytest.raises(ReplayError, match=r"layers\.2\.mlp\.gate.*alone"):
        explain(model, generation, evidence)


def test_amounts_of_a_single_flip_are_exact_and_many_are_no_cause():
    layers = (RoutedLayer(3), RoutedLayer(4))
    token = WorstToken(0, 5, 0.2, 0.19, 0.19, (4, 1), True, 0.18, 7)
    maps = (SequenceFlips(0, np.zeros((6, 2)), 0.4),)
    given = {"carried_L": np.array([1e-4, 2e-4]), "began_L": np.array([9e-5, 5e-5]), "k3": 4e-4, "routing": 3e-4}
    found = Attribution(**given, error=0.3, own_share=None, worst=maps, tokens=(token,), forwards=3, backwards=2)
    layer, cause = sentences(found, layers)
    assert layer.startswith("Flips of decoder 4 carry the most")
    assert "began the most of it in decoder 3" in layer
    assert "not to be relied on" in layer
    assert "The flip in decoder 4 at position 4, a root, carries +0.180 of it" in cause
    assert sentences(replace(found, routing=-1e-8), layers) == [
        "Flips make no part of k3: together they add -1.00e-08 to 4.00e-04 nats."
    ]
    unplaced, same_cause = sentences(replace(found, carried_L=-found.carried_L), layers)
    assert "does not say in which layer" in unplaced
    assert "3.00e-04 of 4.00e-04" in unplaced
    assert same_cause == cause
    many = replace(found, tokens=(replace(token, of_flip=0.02, is_root=False),))
    assert "No single flip is the cause: the first of 7, in decoder 4 at position 4" in sentences(many, layers)[-1]
