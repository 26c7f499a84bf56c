"""Whatever the doctor can say: advice for what is wrong, names for both sides, severities that grow with it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from foreroute.conformance import ALL_CHECKS, CheckResult, ConformanceReport, Outcome
from foreroute.doctor import Evidence, Finding, Severity, diagnose
from foreroute.doctor.evidence import EXPLAINS, Rescored, TrainerPass
from foreroute.errors import InputError
from foreroute.testing.routes import synthetic_trace
from tests.mismatch import planted_defects as planted
from tests.tiers import grid
from tests.traces import spec_of


def pair(plant):
    """Some traces of a trainer, and of an engine in which something is planted."""
    for seed in range(2):
        rng, own = planted.case(seed)
        seen = plant(rng, planted.natural(rng, own))
        yield own, seen[0] if isinstance(seen, tuple) else seen


def swapped(rate):
    return lambda rng, trace: planted.with_ids(trace, planted.swapped(rng, trace.expert_ids_NLK, trace.spec, rate))


def reordered(rng, trace):
    return trace.select(np.roll(np.arange(len(trace)), 1))


def unrouted(rng, trace):
    return replace(trace, valid_N=np.zeros_like(trace.valid_N))


PLANTS = {
    "same": lambda rng, trace: trace,
    "shift": planted.shift,
    "permutation": planted.permutation,
    "flattening": planted.flattening,
    "layer order": planted.layer_order,
    "physical ids": planted.physical_ids,
    "prefix": planted.prefix_missing,
    "version": planted.weight_version,
    "nearly all": swapped(0.97),
    "reordered and other": lambda rng, trace: swapped(0.9)(rng, reordered(rng, trace)),
    "unrouted": unrouted,
}


def require_advice(found):
    """For everything that is wrong."""
    assert all(each.advice or each.severity < Severity.WARNING for each in found.findings), found


def report(*outcomes):
    results = [
        CheckResult(c, o, "raised KeyError: 'x'" * (o is Outcome.FAILED))
        for c, o in zip(ALL_CHECKS, outcomes, strict=False)
    ]
    return ConformanceReport("test", tuple(results))


def without_model(own, engine, logprobs_R=None):
    """What a user's own passes are."""
    of_engine = None if logprobs_R is None else logprobs_R + 0.1
    return Evidence(engine=engine, engine_logprobs_R=of_engine, native=TrainerPass(own, logprobs_R))


def with_model(own, engine, logprobs_R=None):
    """What `examine` hands over."""
    given = without_model(own, engine, logprobs_R)
    replayed = TrainerPass(engine, None if logprobs_R is None else logprobs_R + 0.09)
    wired = report(Outcome.PASSED, Outcome.PASSED)
    return replace(given, replayed=replayed, repacked=given.native, conformance=wired)


@grid("name", PLANTS, quick=5)
def test_every_defect_is_told_with_advice(name):
    for (own, engine), given in itertools.product(pair(PLANTS[name]), (with_model, without_model)):
        if name == "unrouted" and given is without_model:
            with pytest.raises(InputError):
                diagnose(given(own, engine))
        else:
            require_advice(diagnose(given(own, engine, None if given is without_model else np.full(9, -1.5))))


def probabilities(without, replayed=None, repacked=None):
    """Evidence of log-probs alone, off by so many nats in every token."""
    engine, off = np.full(50, -801.0), {"native": without, "replayed": replayed}
    off |= {"repacked": repacked}
    passes = {name: TrainerPass(None, engine + nats) for name, nats in off.items() if nats is not None}
    return Evidence(engine_logprobs_R=engine, **passes)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_probabilities_are_told_with_advice_however_far_apart():
    far = (0.0, 1e-6, 0.05, 0.5, 3.0, 800.0)
    for without, replayed, repacked in itertools.product(far, (None, *far), (None, 0.0, 0.3)):
        require_advice(diagnose(probabilities(without, replayed, repacked)))


@pytest.mark.parametrize(
    ("without", "replayed", "worst", "told"),
    [
        (0.0, 0.5, Severity.PROBLEM, "makes it worse"),
        (1.0, 1.0, Severity.PROBLEM, ""),
        (0.2, None, Severity.WARNING, ""),
        (0.01, None, Severity.NOTE, ""),
        (1.0, 0.01, Severity.NOTE, "F(2) from 100.00% to 0.00%"),
    ],
)
def test_probabilities_are_judged_by_how_far_apart_they_are(without, replayed, worst, told):
    found = diagnose(probabilities(without, replayed))
    assert found.worst is worst
    assert told in found.headline
    assert ("natural logarithms" in str(found.findings)) == (max(without, replayed or 0) > 0.1 and told == "")
    assert "Parity would pay" not in str(found.findings), "where most tokens are apart, something is broken"
    assert "F(2)" not in diagnose(probabilities(0.05, 0.01)).headline, "a share of nothing is not told"


@pytest.mark.parametrize(("sets", "topic"), [(2, "masks"), (32, "temperature")])
def test_a_temperature_that_is_only_nearer_is_no_cause(sets, topic):
    """The engine draws from the two most likely tokens of 32, or at the temperature that is near to that."""
    p_V = np.array([0.42, 0.28, *[0.01] * 30])
    at = {t: p_V ** (1 / t) / (p_V ** (1 / t)).sum() for t in (1.0, 0.7)}
    q_V = (at[1.0] if sets == 2 else at[0.7])[:sets]
    drawn = np.repeat(np.arange(sets), np.rint(400 * q_V / q_V.sum()).astype(int))
    engine = np.log(q_V / q_V.sum())[drawn]
    own, other = (np.log(each)[drawn] for each in at.values())
    passes = {"native": TrainerPass(None, own), "replayed": TrainerPass(None, own)}
    found = diagnose(Evidence(engine_logprobs_R=engine, rescored=(Rescored(0.7, False, other),), **passes))
    assert found.measures.rescored[1].k3 * EXPLAINS < found.measures.with_replay.k3
    assert found.findings[0].topic == topic


def test_samples_of_one_prompt_are_no_evidence_each():
    """Replay harms a quarter of 100 sequences: all samples of one prompt of four, or 25 prompts of 100."""
    found, engine, harm = {}, np.full(200, -3.0), np.repeat([0.5, 1e-3], [50, 150])
    passes = {"native": TrainerPass(None, engine + 1e-3), "replayed": TrainerPass(None, engine + harm)}
    for prompts in (1, 4, 100):
        trace = synthetic_trace(spec_of(), [6] * prompts, seed=0).select(np.repeat(np.arange(prompts), 100 // prompts))
        lengths = {"response_lengths_S": np.full(100, 2), "prompt_lengths_S": np.full(100, 3)}  # one is of a tool
        evidence = Evidence(engine=trace, engine_logprobs_R=engine, **lengths, **passes)
        found[prompts] = diagnose(evidence)
    assert "by no more than chance" in str(found[4].findings)
    assert "makes it worse" in str(found[100].findings)
    assert found[4].measures.ratio[1] > 2 * found[100].measures.ratio[1]
    # one prompt alone has no error, and its samples are taken for the draws
    assert found[1].measures.ratio == found[100].measures.ratio
    with pytest.raises(InputError, match=r"99 prompt.*100 sequences"):
        diagnose(replace(evidence, prompt_lengths_S=np.full(99, 3)))


def test_the_rest_is_told_with_advice():
    _, trace = planted.case(0)
    all_fail = report(*(Outcome.FAILED for _ in ALL_CHECKS))
    for evidence in (
        Evidence(attach_error="model.layers.1.mlp has no router\n   that can be seen; upgrade"),
        Evidence(conformance=all_fail),
        Evidence(conformance=report(Outcome.FAILED, Outcome.PASSED)),
        Evidence(replay_error="the trace belongs to another model"),
        Evidence(packed_routers="weights of routers were packed; leave them out"),
        Evidence(random_weights=True),
        Evidence(random_weights=True, engine=trace),
        *(Evidence(engine=trace.with_weight_version(v), expected_version=4) for v in (-1, 0)),
    ):
        require_advice(diagnose(evidence))


def test_what_others_wrote_is_shown_and_not_obeyed():
    finding = Finding(Severity.PROBLEM, "wiring", "Seen:\n  \x1b[2J\u202e.", "Take\x07 care.")
    assert finding.sentence == r"Seen: \x1b[2J\u202e."
    assert finding.advice == r"Take\x07 care."
