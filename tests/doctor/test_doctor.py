"""Planted problems of routes, weights and choices of indexers, and what the doctor says about them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor import examine as module
from foreroute.doctor.evidence import TrainerPass
from foreroute.doctor.examine import QUICK, examine
from foreroute.testing.models import SMALL, tiny
from foreroute.trace import SAMPLING
from tests.attended import SIZES
from tests.doctor.doctor_cases import VERSION, generation, older
from tests.traces import random_trace


def diagnosis(model, sequences, **options):
    return diagnose(examine(model, sequences, **options))


def sentences(found, topic):
    return " ".join(f.sentence for f in found.findings if f.topic == topic)


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3_moe")


@pytest.fixture(scope="module")
def coarse(model):
    """What a bfloat16 engine made, and what a trainer makes of it whose micro-steps hold less than some sequences."""
    good = generation(model, "bfloat16")
    assert good.trace.lengths.max() > 16 > good.trace.lengths.min()
    return good, examine(model, good, micro_step_tokens=16)


OTHER_GATES = [
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
    pytest.param("gpt_oss", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("family", ["qwen3_moe", *OTHER_GATES])
def test_fine_data_is_called_fine(family):
    trainer = tiny(family)
    found = diagnosis(trainer, generation(trainer), expected_version=VERSION)
    assert found.worst is Severity.FINE
    assert found.headline.startswith("Fine: the engine is as close to the trainer as the trainer is to itself")
    assert "Replay is wired" in sentences(found, "wiring")
    assert "repeats itself bit for bit" in sentences(found, "trainer")


def test_a_bfloat16_engine_is_helped_by_a_stated_factor(coarse):
    found = diagnose(coarse[1])
    gain = found.measures.gain
    assert gain > 3
    assert found.worst is Severity.NOTE
    assert found.headline.startswith(f"R3 helps by a factor of {gain:.3g}")
    assert found.headline.endswith(f"response tokens of weight version {VERSION}.")
    assert "the first layer that differs is decoder " in sentences(found, "routes")


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
    assert "Routes agree" in sentences(found, "probabilities")
    assert diagnosis(model, generation(model, temperature=0.5), temperature=0.5).worst is Severity.FINE


@pytest.mark.slow
@pytest.mark.usefixtures("unwired")
def test_a_trace_of_another_model_is_refused_in_words(model):
    found = diagnosis(model, generation(tiny("deepseek_v3")))
    assert "The trace cannot be replayed: the trace belongs to another model" in found.headline


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
def test_routes_alone_are_compared_with_sampling_masks_beside_them(model):
    masked = generation(model, "bfloat16", top_p=0.8).trace
    assert SAMPLING in masked.streams
    found, plain = (diagnosis(model, None, trace=trace) for trace in (masked, masked.without_streams(SAMPLING)))
    assert found.measures.routes.differing_L.tolist() == plain.measures.routes.differing_L.tolist()
    assert found.headline == plain.headline
    assert found.worst is plain.worst is Severity.FINE
    assert plain.measures.without is None
    assert plain.measures.routes.rows > 0


def test_passes_that_the_user_ran_need_no_model(coarse):
    good, evidence = coarse
    given = Evidence(
        engine=good.trace,
        engine_logprobs_R=good.logprobs_R,
        native=TrainerPass(evidence.native.executed, evidence.native.logprobs_R),
        replayed=TrainerPass(None, evidence.replayed.logprobs_R),
    )
    assert diagnose(given).headline == diagnose(evidence).headline
    without_replay = diagnose(replace(given, replayed=None))
    assert "apart by k3" in sentences(without_replay, "probabilities")


def test_the_quick_checks_leave_a_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    examine(model, None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {"routes-followed", "native-bit-equal", "stale-refused"} <= set(QUICK)
    assert not {"recompute-order", "wide-ids", "reference-untouched"} & set(QUICK)


def logprobs_of_logits(model, sequences, temperature=1.0):
    """Of the response tokens, each sequence alone, from all its logits in float64."""
    found = []
    for s in range(len(sequences)):
        tokens = torch.from_numpy(sequences.trace.tokens(s).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1].double() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found.append(logprobs[-int(sequences.response_lengths[s]) :].numpy())
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"], ids=["a plain head", "a head that is scaled"])
def test_logits_are_made_of_a_few_response_tokens_at_a_time(family, monkeypatch):
    scaled = {"logits_scaling": 3.0, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = tiny(family) if family == "qwen3_moe" else hf.build_model(family, seed=0, **SMALL, **scaled).eval()
    good = generation(model, temperature=0.7)
    seen = []
    monkeypatch.setattr(module, "LOGITS_BYTES", 5 * 4 * 50, raising=False)
    with monkeypatch.context() as patch:  # the quick checks make logits of their own
        patch.setattr(module, "QUICK", ())
        handle = model.lm_head.register_forward_hook(lambda head, args, output: seen.append(output.shape[:-1].numel()))
        evidence = examine(model, good, temperature=0.7)
        handle.remove()
    assert max(seen) <= len(good), "one position of each sequence, or five response tokens"
    assert sum(seen) > 4 * good.response_lengths.sum(), "two passes and two more"
    expected = logprobs_of_logits(model, good, 0.7)
    np.testing.assert_allclose(evidence.native.logprobs_R, expected, atol=2e-5)
    np.testing.assert_allclose(evidence.repacked.logprobs_R, expected, atol=2e-5)


@pytest.fixture(scope="module")
def sparse():
    return hf.build_model("deepseek_v32", seed=0, **SIZES).eval()


def about_indexers(model, sequences):
    return [f for f in diagnose(examine(model, sequences)).findings if f.topic in ("indexers", "replay")]


@pytest.mark.slow
@pytest.mark.usefixtures("unwired")
def test_right_choices_are_called_fine(sparse):
    (choices, replay) = about_indexers(sparse, generation(sparse, indexers=True))
    assert (choices.severity, replay.severity) == (Severity.FINE, Severity.FINE)
    assert "chose other units in at least one layer of 0 of" in choices.sentence


@pytest.mark.usefixtures("unwired")
@pytest.mark.slow
def test_other_choices_are_counted_and_a_trace_without_any_is_warned_of(sparse):
    choices = about_indexers(sparse, generation(sparse, "bfloat16", indexers=True))[0]
    assert choices.severity is Severity.NOTE
    assert " of 0 of" not in choices.sentence
    (choices, *_) = about_indexers(sparse, generation(sparse, "bfloat16"))
    assert choices.severity is Severity.WARNING
    assert "the trace has none of their choices" in choices.sentence
    assert "indexers=True" in choices.advice


@pytest.mark.parametrize("has_indexers", [True, False])
def test_routes_alone_may_make_it_worse_and_are_not_called_those_of_other_tokens(has_indexers):
    engine = np.linspace(-3, -1, 9)
    evidence = Evidence(
        engine=random_trace(0),
        engine_logprobs_R=engine,
        native=TrainerPass(None, engine + 0.1),
        replayed=TrainerPass(None, engine + 0.2),
        has_indexers=has_indexers,
    )
    (worse,) = [f for f in diagnose(evidence).findings if "makes it worse" in f.sentence]
    assert worse.advice.startswith("Routes without the choices of indexers" if has_indexers else "These are not the")


@pytest.mark.slow
@pytest.mark.usefixtures("unwired")
def test_shifted_choices_are_refused(sparse):
    good = generation(sparse, indexers=True)
    rows = np.arange(good.trace.num_rows) - 1
    rows[good.trace.offsets[:-1]] = good.trace.offsets[:-1]
    wrong = good.trace.with_stream("indexer", good.trace.streams["indexer"].take(rows))
    found = about_indexers(sparse, replace(good, trace=wrong))
    (replay,) = [f for f in found if f.topic == "replay"]
    assert "The trace cannot be replayed" in replay.sentence
    assert "belong to another row" in replay.sentence
