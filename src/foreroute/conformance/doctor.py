"""Findings from evidence: is replay wired, what is the mismatch, where does it start, does replay help. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from foreroute.conformance.check import Outcome
from foreroute.conformance.diagnosis import Diagnosis, Evidence, Finding, Measures, Severity, measure
from foreroute.mismatch import Defect, Explanation

HELPS = 1.5
"""Ratio of k3 without to k3 with replay from which replay is said to help, and below whose inverse to harm."""
LARGE = 1e-2
"""k3, in nats, from which what is left under replay is more than another precision makes."""

USE = "Train with replay: with routed.replay(trace, weight_version=...) around recompute and update."

ADVICE = {
    Defect.SHIFT: "Check where the prompt ends and whether the engine returns T or T - 1 rows: row p is the routing of "
    "input position p.",
    Defect.PERMUTATION: "Carry routes with their tokens through every sort, shuffle and gather between engine and "
    "trainer.",
    Defect.FLATTENING: "Flatten and read the padded batch in one order, or hand over packed sequences.",
    Defect.LAYER_OFFSET: "Give the trace the layer table of the model: dense layers have no row (capture.decode does).",
    Defect.PHYSICAL_IDS: "Switch the engine's expert load balancer off, or upgrade to a version that returns logical "
    "experts.",
    Defect.PREFIX_MISSING: "Switch the engine's prefix cache off for captured requests, or join the rows of the cached "
    "prefix with trace.extended.",
    Defect.LAYER_REPLACED: "Capture the target model's layers only: a draft or MTP layer was written over this one.",
    Defect.WEIGHT_VERSION: "Replay the routes of the rollout that this update belongs to, and check that the engine "
    "received the last weights; session.replay(trace, weight_version=...) refuses the others.",
    Defect.UNEXPLAINED: "Compare one sequence by hand: tokens, weights and precision of engine and trainer.",
}


def diagnose(evidence: Evidence, facts: Mapping[str, str] | None = None) -> Diagnosis:
    """Turn evidence into findings.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces of other models or tokens are compared.
        InputError: when log-probs do not fit together.
    """
    measures = measure(evidence)
    findings = tuple(
        finding
        for part in (_wiring(evidence), _versions(evidence), _routes(evidence, measures), _replay(evidence, measures))
        for finding in part
    ) + tuple(_trainer(measures))
    return Diagnosis(headline=_headline(findings), findings=findings, measures=measures, facts=dict(facts or {}))


def _headline(findings: tuple[Finding, ...]) -> str:
    problems = [f for f in findings if f.severity is Severity.PROBLEM]
    if problems:
        more = f" ({len(problems) - 1} more below)" if len(problems) > 1 else ""
        return f"Fix this first: {problems[0].sentence}{more}"
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    if warnings:
        return f"Look at this: {warnings[0].sentence}"
    verdict = [f.sentence for f in findings if f.topic == "replay"]
    return verdict[0] if verdict else "Nothing is wrong with what was examined."


def _wiring(evidence: Evidence) -> Iterator[Finding]:
    if evidence.attach_error:
        yield Finding(
            Severity.PROBLEM,
            "wiring",
            f"Replay is not wired: the adapter refuses this model. {evidence.attach_error}",
            "Upgrade foreroute or transformers, or report the family; nothing is replayed until attach succeeds.",
        )
    if evidence.conformance is not None:
        passed = len(evidence.conformance.with_outcome(Outcome.PASSED))
        for result in evidence.conformance.results:
            if result.outcome is Outcome.FAILED:
                sentence = f"On this model it does not hold that: {result.check.title}. {result.reason}"
                yield Finding(Severity.PROBLEM, "wiring", sentence, f"See the check {result.check.id}.")
        if evidence.conformance.ok:
            sentence = f"Replay is wired: attach proved itself, and {passed} quick checks passed on this model."
            yield Finding(Severity.FINE, "wiring", sentence)
    if evidence.random_weights:
        yield Finding(
            Severity.NOTE,
            "wiring",
            "No weights were given, so only the wiring was examined: the model is filled at random.",
            "Name a folder with weights, or a checkpoint, to have the mismatch measured.",
        )


def _versions(evidence: Evidence) -> Iterator[Finding]:
    if evidence.expected_version is None or evidence.engine is None:
        return
    versions = evidence.engine.versions
    if versions != (evidence.expected_version,):
        yield Finding(
            Severity.PROBLEM,
            "routes",
            f"The trace is stale: its rows are of weight versions {list(versions)}, the trainer is at "
            f"{evidence.expected_version}.",
            ADVICE[Defect.WEIGHT_VERSION],
        )


def _routes(evidence: Evidence, measures: Measures) -> Iterator[Finding]:
    explained, routes, engine = measures.explanation, measures.routes, evidence.engine
    if explained is None or routes is None or engine is None:
        return
    sentence = explained.sentence.replace("B ", "The engine's trace ", 1).replace("of B ", "of the engine's trace ")
    sentence = sentence.replace("those of A", "those of the trainer")
    sentence, versions, _ = sentence.partition(" (weight versions")
    sentence += "." if versions else ""
    if explained.kind is not Defect.NONE:
        severity = Severity.WARNING if explained.kind is Defect.UNEXPLAINED else Severity.PROBLEM
        yield Finding(severity, "routes", sentence, ADVICE[explained.kind])
    if not routes.rows:
        return
    if not routes.by_differing_layers[1:].sum():
        yield Finding(Severity.FINE, "routes", f"All {routes.rows} rows have the same experts in every layer.")
        return
    first = int(np.argmax(routes.first_differing_L))
    share = routes.first_differing_L[first] / routes.first_differing_L.sum()
    yield Finding(
        Severity.FINE if explained.kind is Defect.NONE else Severity.NOTE,
        "routes",
        f"{routes.differing_share:.1%} of the (token, layer) cells and {routes.differing_tokens_share:.1%} of the "
        f"tokens have other experts. It starts in {engine.spec.layers[first]} for {share:.0%} of the tokens that "
        f"differ, and at position {_first_position(explained)} of the sequences.",
    )


def _first_position(explained: Explanation) -> int:
    with np.errstate(invalid="ignore"):
        return int(np.argmax(explained.overlap_by_position_T < 1))


def _replay(evidence: Evidence, measures: Measures) -> Iterator[Finding]:
    if evidence.replay_error:
        yield Finding(Severity.PROBLEM, "replay", f"The trace cannot be replayed: {evidence.replay_error}")
    without, replayed, gain = measures.without, measures.with_replay, measures.gain
    if without is None or evidence.random_weights:
        return
    figures = f"k3 {without.k3:.2e} nats, F(2) {without.f(2.0):.2%} over {without.count} response tokens"
    if replayed is None or gain is None:
        yield Finding(Severity.NOTE, "probabilities", f"Trainer and engine are apart by {figures}, without replay.")
        return
    both = (
        f"k3 goes from {without.k3:.2e} to {replayed.k3:.2e} nats, F(2) from {without.f(2.0):.2%} to "
        f"{replayed.f(2.0):.2%}, over {without.count} response tokens"
    )
    if max(without.k3, replayed.k3) <= measures.floor:
        yield Finding(
            Severity.FINE, "replay", f"Fine: the engine is as close to the trainer as the trainer is to itself; {both}."
        )
    elif gain >= HELPS:
        yield Finding(Severity.NOTE, "replay", f"R3 helps by a factor of {gain:.3g}: {both}.", USE)
    elif gain > 1 / HELPS:
        yield Finding(Severity.NOTE, "replay", f"R3 makes little difference here: {both}.")
    else:
        yield Finding(
            Severity.PROBLEM,
            "replay",
            f"Replaying this trace makes it worse by a factor of {1 / gain:.3g}: {both}.",
            "These are not the routes of these tokens under these weights. Do not train on them.",
        )
    if replayed.k3 > LARGE and gain > 1 / HELPS:
        yield Finding(
            Severity.WARNING,
            "probabilities",
            f"Also on the engine's routes the probabilities are apart (k3 {replayed.k3:.2e}), by more than bfloat16 "
            "makes: FP8, other weights, another temperature, or another prompt.",
            "Check that the engine received the last weights, and that temperature and template are the same.",
        )


def _trainer(measures: Measures) -> Iterator[Finding]:
    repeated, repacked = measures.repeated, measures.repacked
    if repeated is not None:
        if repeated.max_abs_log == 0:
            yield Finding(Severity.FINE, "trainer", "The trainer repeats itself bit for bit on the same batches.")
        else:
            yield Finding(
                Severity.WARNING,
                "trainer",
                f"The trainer does not repeat itself on the same batches: k3 {repeated.k3:.2e}, log-probs off by up to "
                f"{repeated.max_abs_log:.2e}.",
                "Is dropout or router jitter on? Otherwise a kernel is not deterministic.",
            )
    if repacked is not None:
        routes = measures.repacked_routes
        share = f", and {routes.differing_share:.2%} of its (token, layer) cells take other experts" if routes else ""
        yield Finding(
            Severity.FINE if repacked.k3 < LARGE / 10 else Severity.WARNING,
            "trainer",
            f"Packed one sequence at a time, the trainer differs from itself by k3 {repacked.k3:.2e}{share}. No engine "
            "can be closer than that.",
        )
