"""Planted problems of routes, weights and choices of indexers, and what the doctor says about them."""

from dataclasses import replace

import pytest
import torch

from foreroute.adapters import hf
from foreroute.doctor import Severity, diagnose
from foreroute.doctor.examine import examine
from foreroute.testing.models import tiny
from tests.attended import SIZES
from tests.doctor.doctor_cases import VERSION, generation, older


def diagnosis(model, sequences, **options):
    return diagnose(examine(model, sequences, **options))


def sentences(found, topic):
    return " ".join(f.sentence for f in found.findings if f.topic == topic)


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3_moe")


def test_fine_data_is_called_fine_and_the_model_left_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = diagnosis(model, generation(model), expected_version=VERSION)
    assert found.worst is Severity.FINE
    assert found.headline.startswith("Fine: the engine is as close to the trainer as the trainer is to itself")
    assert "Replay is wired" in sentences(found, "wiring")
    assert "repeats itself bit for bit" in sentences(found, "trainer")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("unwired")
def test_a_bfloat16_engine_is_helped_by_a_stated_factor(model):
    """Also where micro-steps hold less than some sequences."""
    good = generation(model, "bfloat16")
    assert good.trace.lengths.max() > 16 > good.trace.lengths.min()
    found = diagnosis(model, good, micro_step_tokens=16)
    gain = found.measures.gain
    assert gain > 3
    assert found.worst is Severity.NOTE
    assert found.headline.startswith(f"R3 helps by a factor of {gain:.3g}")
    assert found.headline.endswith(f"response tokens of weight version {VERSION}.")
    assert " of the tokens: first in decoder " in sentences(found, "routes")


@pytest.mark.usefixtures("unwired")
def test_stale_weights_are_named_with_and_without_a_stated_version(model):
    evidence = examine(model, generation(older(model)))
    found = diagnose(evidence)
    assert found.headline.startswith("Fix this first: Other weights: ")
    assert "Also on the engine's routes the probabilities are apart" in sentences(found, "probabilities")
    stated = diagnose(replace(evidence, expected_version=VERSION + 1))
    assert f"its rows are of weight version {VERSION}, and the trainer is at {VERSION + 1}" in stated.headline


@pytest.mark.slow
@pytest.mark.usefixtures("unwired")
def test_another_temperature_is_not_blamed_on_routes(model):
    found = diagnosis(model, generation(model, temperature=0.5))
    assert "fit a temperature of 0.5: k3 is " in sentences(found, "temperature")
    assert "Causes can be" in sentences(found, "probabilities")
    assert "inside of routed.replay" not in str(found.findings), "the doctor ran the pass itself"
    assert diagnosis(model, generation(model, temperature=0.5), temperature=0.5).worst is Severity.FINE


def test_a_model_that_replay_does_not_reach_is_not_wired():
    model = tiny("qwen3_moe")
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden
    assert "Replay is not wired" in diagnosis(model, generation(tiny("qwen3_moe"))).headline


@pytest.mark.slow
def test_a_trainer_with_dropout_left_on_does_not_repeat_itself(model):
    noisy = tiny("qwen3_moe")
    noisy.lm_head.register_forward_hook(lambda m, a, out: out + 0.01 * torch.randn_like(out))
    found = diagnosis(noisy, generation(model))
    assert "does not repeat itself" in sentences(found, "trainer")
    assert found.worst is Severity.PROBLEM, "the quick checks see it too"


@pytest.mark.slow
@pytest.mark.usefixtures("unwired")
def test_choices_of_indexers_are_replayed_and_a_trace_without_any_is_warned_of():
    sparse = hf.build_model("deepseek_v32", seed=0, **SIZES).eval()
    right, none = (diagnosis(sparse, generation(sparse, indexers=recorded)).findings for recorded in (True, False))
    (choices,) = [f for f in right if f.topic == "indexers"]
    assert choices.severity is Severity.FINE
    assert "chose other units in at least one layer of 0 of" in choices.sentence
    (missing,) = [f for f in none if f.topic == "indexers"]
    assert missing.severity is Severity.WARNING
    assert "indexers=True" in missing.advice
