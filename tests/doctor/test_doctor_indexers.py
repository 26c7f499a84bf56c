"""Choices of indexers, right and wrong, and what the doctor says about them."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.adapters import hf
from foreroute.doctor import Evidence, Severity, diagnose
from foreroute.doctor.evidence import TrainerPass
from foreroute.doctor.examine import examine
from tests.attended import SIZES
from tests.doctor.doctor_cases import generation
from tests.traces import random_trace

pytestmark = pytest.mark.usefixtures("unwired")


@pytest.fixture(scope="module")
def model():
    return hf.build_model("deepseek_v32", seed=0, **SIZES).eval()


def findings(model, sequences):
    return [f for f in diagnose(examine(model, sequences)).findings if f.topic in ("indexers", "replay")]


def test_right_choices_are_called_fine_and_others_are_counted(model):
    (choices, replay) = findings(model, generation(model, indexers=True))
    assert (choices.severity, replay.severity) == (Severity.FINE, Severity.FINE)
    assert "chose other units in at least one layer of 0 of" in choices.sentence
    choices = findings(model, generation(model, "bfloat16", indexers=True))[0]
    assert choices.severity is Severity.NOTE
    assert " of 0 of" not in choices.sentence


@pytest.mark.slow
def test_a_trace_without_choices_is_warned_of(model):
    (choices, *_) = findings(model, generation(model, "bfloat16"))
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


def test_shifted_choices_are_refused(model):
    good = generation(model, indexers=True)
    rows = np.arange(good.trace.num_rows) - 1
    rows[good.trace.offsets[:-1]] = good.trace.offsets[:-1]
    wrong = good.trace.with_stream("indexer", good.trace.streams["indexer"].take(rows))
    found = findings(model, replace(good, trace=wrong))
    (replay,) = [f for f in found if f.topic == "replay"]
    assert "The trace cannot be replayed" in replay.sentence
    assert "belong to another row" in replay.sentence
