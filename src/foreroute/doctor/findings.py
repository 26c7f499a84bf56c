"""Findings from evidence: is replay wired, what is the mismatch, where does it start, does replay help. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from foreroute.capture.checks import UNFREEZE, frozen_rows
from foreroute.conformance import Outcome
from foreroute.doctor.decisions import about_choices, about_masks
from foreroute.doctor.evidence import Evidence, Finding, Measures, Severity, many, measure
from foreroute.doctor.roots import SURE, TOO_FEW, about_parts, about_roots
from foreroute.doctor.zeros import shared_beginnings
from foreroute.errors import InputError
from foreroute.mismatch import Defect, TokenMismatch
from foreroute.mismatch.defects import listed, version_words

HELPS = 1.5
"""Ratio of k3 without to k3 with replay from which replay is said to help, and below whose inverse to harm."""
LARGE = 1e-2
"""k3, in nats, from which what is left under replay is more than another precision makes."""
MOST = 0.5
"""Share from which disagreement is a problem whatever explains it: of routing decisions with other experts, or of
response tokens with probabilities that differ twofold. Precision flips decisions that were close, 5 to 15 % in
bfloat16; an engine that takes most decisions otherwise does not compute the trainer's model at the trainer's
weights."""

USE = (
    'Train with replay, if you do not yet: rl.routing = "R3" in a configuration, or with routed.replay(trace, '
    "weight_version=...) around recompute and update."
)
COMPARED_TWICE = "Bring both sides into one order, log-probs included, and run the doctor again."
NOT_THIS_MODEL = (
    "Do not train with replay on this model before the check passes: upgrade foreroute or transformers, or report the "
    "family with this sentence."
)
NOT_THESE_ROUTES = (
    "These are not the routes of these tokens under these weights, and not to be trained on; or the engine's log-probs "
    "are of another pass than its routes: a second forward of the engine takes routes of its own."
)
OTHER_SEQUENCES = "Carry log-probs with their tokens through every sort, shuffle and gather between engine and trainer."
SAME_PASS = (
    "The trainer's log-probs with and without replay are the same in every bit: if routes differ, give those of a pass "
    "inside of routed.replay(trace)."
)
NEXT_TOKEN = (
    "Logits of position p score token p + 1. Cut both sides alike: the first log-prob of a response is that of its "
    "first token."
)
SAME_TOKENS = (
    "See that both sides have natural logarithms at one temperature, that each log-prob is of the same token on both "
    "(logits of position p score token p + 1), and that the mask marks responses alone."
)
WITH_REPLAY = (
    "Measure with replay as well (--model, --replayed, or replayed_logprobs of fr.compare): it tells how much of this "
    "is routing."
)
UNLIKE = f"Check that the engine received the last weights. {SAME_TOKENS}"
LIKE_ROUTES = f"Routes are the same, so that replay mends nothing. {SAME_TOKENS}"
NO_ROUTES = "Look at both with foreroute inspect: a trace without routed rows was captured without routes."

ADVICE = {
    Defect.SHIFT: "Check where the prompt ends and whether the engine returns T or T - 1 rows: row p is the routing of "
    "input position p.",
    Defect.PERMUTATION: "Carry routes with their tokens through every sort, shuffle and gather between engine and "
    "trainer.",
    Defect.FLATTENING: "Flatten and read the padded batch in one order, or hand over packed sequences.",
    Defect.LAYER_OFFSET: "Give the trace the layer table of the model: dense layers have no row (capture.decode does).",
    Defect.LAYER_ORDER: "Stack layers by their number in the model: as text, layer 10 sorts before layer 2, and stages "
    "of a pipeline may be joined in another order.",
    Defect.PHYSICAL_IDS: "Switch the engine's expert load balancer off, or upgrade to a version that returns logical "
    "experts.",
    Defect.PREFIX_MISSING: "Switch the engine's prefix cache off for captured requests, or join the rows of the cached "
    "prefix with trace.extended.",
    Defect.LAYER_REPLACED: "Capture the target model's layers only: a draft or MTP layer was written over this one.",
    Defect.WEIGHT_VERSION: "Replay the routes of the rollout that this update belongs to, and check that the engine "
    "received the last weights; routed.replay(trace, weight_version=...) refuses the others.",
    Defect.UNEXPLAINED: "Make sure first that the trainer examined here has the weights that the engine sampled with. "
    "If the share stays, switch the engine's quantisation, expert load balancer, "
    "prefix cache and speculative decoding off one by one, record again, and run the doctor after each.",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """Findings, worst first within each topic's order, and the figures behind them.

    Attributes:
        headline: the one sentence to read.
        findings: in the order in which they should be read.
        measures: the figures.
        facts: what was examined, as short strings.
    """

    headline: str
    findings: tuple[Finding, ...]
    measures: Measures
    facts: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Diagnosis({self.headline!r}, {len(self.findings)} findings)"

    def __str__(self) -> str:
        """The headline."""
        return self.headline

    @property
    def worst(self) -> Severity:
        """The severity of the worst finding."""
        return max((finding.severity for finding in self.findings), default=Severity.FINE)


def diagnose(evidence: Evidence, facts: Mapping[str, str] | None = None) -> Diagnosis:
    """Turn evidence into findings.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces of other models or tokens are compared.
        InputError: when log-probs do not fit together, or there is nothing to compare.
    """
    measures = measure(evidence)
    # from what makes all else meaningless to what is read last
    before = (
        *_wiring(evidence),
        *_weights(evidence),
        *_versions(evidence),
        *_frozen(evidence),
        *_routes(evidence, measures),
        *about_roots(measures),
        *about_masks(evidence, measures),
        *_marked(evidence),
        *about_choices(evidence, measures),
    )
    roots = measures.roots
    # a warning of routes alone may be another precision
    is_broken = any(each.severity is Severity.PROBLEM for each in before) or bool(roots and (roots.far or roots.steep))
    findings = (*before, *_replay(evidence, measures, is_broken), *_trainer(measures))
    if {finding.advice for finding in findings} <= {NO_ROUTES}:  # lest nothing at all be called fine
        raise InputError(
            "there is nothing to compare: no row is routed on both sides, and no sampled token has log-probs of both. "
            "Look at traces with foreroute inspect, give generations in place of traces, or a mask with a 1"
        )
    return Diagnosis(headline=_headline(findings), findings=findings, measures=measures, facts=dict(facts or {}))


def _headline(findings: tuple[Finding, ...]) -> str:
    problems = [f for f in findings if f.severity is Severity.PROBLEM]
    if problems:
        others = len(problems) - 1
        more = f" See below for {many(others, 'more problem')}." if others else ""
        return f"Fix this first: {problems[0].sentence}{more}"
    # a verdict about replay is worth nothing beside a problem, and little beside a warning
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    if warnings:
        return f"Look at this: {warnings[0].sentence}"
    verdict = [f.sentence for f in findings if f.topic in ("replay", "probabilities")]
    return verdict[0] if verdict else "Nothing is wrong with what was examined."


def _wiring(evidence: Evidence) -> Iterator[Finding]:
    """Say whether replay reaches the routers of this model."""
    if evidence.attach_error:
        yield Finding(
            Severity.PROBLEM,
            "wiring",
            f"Replay is not wired, because the adapter refuses this model: {_quoted(evidence.attach_error)}",
            "Upgrade foreroute or transformers, or report the family; nothing is replayed until attach succeeds.",
        )
    if evidence.conformance is None:
        return
    passed = len(evidence.conformance.with_outcome(Outcome.PASSED))
    for result in evidence.conformance.results:
        if result.outcome is Outcome.FAILED:
            title = result.check.title[:1].lower() + result.check.title[1:]
            sentence = f"The check {result.check.id} ({title}) failed on this model: {_quoted(result.reason)}"
            yield Finding(Severity.PROBLEM, "wiring", sentence, NOT_THIS_MODEL)
    if evidence.conformance.ok:
        sentence = f"Replay is wired: attach proved itself, and {many(passed, 'quick check')} passed on this model."
        yield Finding(Severity.FINE, "wiring", sentence)


def _weights(evidence: Evidence) -> Iterator[Finding]:
    """Say whether the model has weights, and its routers have them whole."""
    if evidence.packed_routers:
        seen, _, advice = (each[:1].upper() + each[1:] for each in evidence.packed_routers.partition("; "))
        yield Finding(Severity.WARNING, "weights", f"{seen}.", f"{advice}.")
    if evidence.random_weights:
        compared = " The trace was compared with nothing." if evidence.engine is not None else ""
        yield Finding(
            Severity.WARNING if compared else Severity.NOTE,
            "weights",
            f"No weights were given, so only the wiring was examined: the model is filled at random.{compared}",
            "Name a folder with weights to have the mismatch measured.",
        )


def _versions(evidence: Evidence) -> Iterator[Finding]:
    """Say whether the routes were recorded under the weights that the trainer has."""
    if evidence.expected_version is None or evidence.engine is None:
        return
    stated, expected = version_words(evidence.engine), evidence.expected_version
    # a stale trace looks like noise in every figure below, so versions are compared before routes
    if not stated:
        yield Finding(
            Severity.PROBLEM,
            "routes",
            f"The trace does not say under which weights it was recorded, and the trainer is at {expected}.",
            "Stamp routes when they are captured: capture.decode(..., weight_version=...), or foreroute convert "
            "--weight-version.",
        )
    elif tuple(version for version in evidence.engine.versions if version >= 0) != (expected,):
        yield Finding(
            Severity.PROBLEM,
            "routes",
            f"The trace is stale: its rows are of {stated}, and the trainer is at {expected}.",
            ADVICE[Defect.WEIGHT_VERSION],
        )


def _frozen(evidence: Evidence) -> Iterator[Finding]:
    """Find rows that an engine cannot have routed so, unless the trainer routes so too."""
    own = evidence.native.executed if evidence.native is not None else None
    if evidence.engine is not None and (found := frozen_rows(evidence.engine)) and not (own and frozen_rows(own)):
        yield Finding(Severity.PROBLEM, "routes", f"In the engine's trace, {found}.", UNFREEZE)


def _marked(evidence: Evidence) -> Iterator[Finding]:
    """Find tokens that neither side scored, and that were marked as those of responses all the same."""
    engine_R, lengths_S = evidence.engine_logprobs_R, evidence.response_lengths_S
    own_R = evidence.native.logprobs_R if evidence.native is not None else None
    if engine_R is None or own_R is None or lengths_S is None or len(own_R) != len(engine_R):
        return
    if (zeros_S := shared_beginnings(own_R, engine_R, lengths_S)) is not None:
        yield Finding(
            Severity.WARNING,
            "probabilities",
            f"Every sequence begins with response tokens whose log-prob is exactly 0 on both sides, {zeros_S.sum()} of "
            f"{len(own_R)} in all, as where a mask marks prompts or padding. Means are over them too.",
            "If these are tokens of prompts, give the mask of response tokens, not the attention mask. A policy that "
            "is sure of a template has such zeros too.",
        )


def _routes(evidence: Evidence, measures: Measures) -> Iterator[Finding]:
    """Say what sets the routes of both sides apart, and where it starts."""
    explained, routes = measures.explanation, measures.routes
    if explained is None or routes is None:
        own = evidence.native.executed if evidence.native is not None else None
        # routes of random weights are compared with nothing
        if evidence.engine is not None and own is not None and not evidence.random_weights:
            yield Finding(Severity.WARNING, "routes", "No row is routed in both traces.", NO_ROUTES)
        return
    if measures.reordered:
        apart = " Their log-probs were not compared." if evidence.engine_logprobs_R is not None else ""
        yield Finding(
            Severity.PROBLEM,
            "routes",
            f"The engine's trace holds the sequences of the trainer's own trace in another order, tokens included. "
            f"Routes were compared in the trainer's order.{apart}",
            COMPARED_TWICE,
        )
    if explained.defect is Defect.UNEXPLAINED:
        # precision flips close decisions; a majority of them is another computation
        severity = Severity.PROBLEM if explained.differing >= MOST else Severity.WARNING
        yield Finding(severity, "routes", explained.sentence, ADVICE[explained.defect])
    elif explained.defect is not Defect.NONE:
        yield Finding(Severity.PROBLEM, "routes", explained.sentence, ADVICE[explained.defect])
    if not routes.by_differing_layers[1:].sum():
        sentence = f"The experts are the same in every layer of {many(routes.rows, 'row')}."
        yield Finding(Severity.FINE, "routes", sentence)
        return
    # layers behind the first one that differs see other inputs, so that their picks tell little
    first = int(np.argmax(routes.first_differing_L))
    share = routes.first_differing_L[first] / routes.first_differing_L.sum()
    with np.errstate(invalid="ignore"):  # positions without a row are NaN
        agreed = int(np.argmax(explained.overlap_by_position_T < 1))
    yield Finding(
        Severity.FINE if explained.defect is Defect.NONE else Severity.NOTE,
        "routes",
        f"Other experts were picked in {routes.differing_share:.1%} of the routing decisions, and in at least one "
        f"layer of {routes.differing_tokens_share:.1%} of the tokens: first in {measures.layers[first]} for "
        f"{share:.0%} of these, more often than in any other."
        + (f" No token before position {agreed} differs." if agreed else ""),
    )


def _replay(evidence: Evidence, measures: Measures, is_broken: bool) -> Iterator[Finding]:
    """Say how far apart probabilities are, and whether replay brings them nearer."""
    if evidence.replay_error:
        yield Finding(
            Severity.PROBLEM,
            "replay",
            f"The trace cannot be replayed: {_quoted(evidence.replay_error)}",
            "Give the trace of a rollout of this very model.",
        )
    without, replayed, gain = measures.without, measures.with_replay, measures.gain
    if without is None:
        return
    if measures.shift is not None:
        moved, after, before = measures.shift
        yield Finding(
            Severity.PROBLEM,
            "probabilities",
            f"The engine's log-probs are shifted by {moved:+d} token: that of token p is the trainer's of token p "
            f"{'-' if moved > 0 else '+'} 1. So, half of them are within {after:.2e} nats; as they are, {before:.2e}.",
            NEXT_TOKEN,
        )
    elif measures.order is not None:
        order, after, before = measures.order
        yield Finding(
            Severity.PROBLEM,
            "probabilities",
            f"The engine's log-probs are those of other sequences, of the trainer's {listed(order)} in this order. "
            f"So, they are within {after:.2e} nats on average; as they are, {before:.2e}.",
            OTHER_SEQUENCES,
        )
    versions = "" if evidence.engine is None else version_words(evidence.engine)
    over = f"over {many(without.count, 'response token')}{versions and f' of {versions}'}"
    if replayed is None or gain is None:
        far = f"{SAME_TOKENS} " if without.k3 > LARGE else ""  # more than flips of experts make
        yield Finding(
            _by_probabilities(without, Severity.NOTE),
            "probabilities",
            f"Trainer and engine are apart by k3 {without.k3:.2e} nats{_tail(without)}, {over}, without replay.",
            LIKE_ROUTES if measures.routes is not None and measures.routes.differing_share == 0 else far + WITH_REPLAY,
        )
        return
    both = f"k3 goes from {without.k3:.2e} to {replayed.k3:.2e} nats{_tail(without, replayed)}, {over}"
    # the first that holds: what hides the answer, then no difference worth a word, then help, harm and chance
    if measures.zeros:
        yield Finding(Severity.NOTE, "replay", f"Log-probs of exactly 0 hide whether R3 helps: {both}.")
    elif max(without.k3, replayed.k3) <= measures.floor:
        yield Finding(
            Severity.FINE, "replay", f"Fine: the engine is as close to the trainer as the trainer is to itself; {both}."
        )
    elif gain >= HELPS:
        yield Finding(Severity.NOTE, "replay", f"R3 helps by a factor of {gain:.3g}: {both}.", USE)
    elif gain > 1 / HELPS:  # neither a help nor a harm that anybody would act on
        may_help = measures.rise is not None and (replayed.k3 - SURE * measures.rise[1]) * HELPS <= without.k3
        tokens, advice = ("over these tokens", TOO_FEW) if may_help else ("here", "")
        own, under = (None if each is None else each.logprobs_R for each in (evidence.native, evidence.replayed))
        # a pass that the doctor ran itself was one under replay
        was_given = evidence.replayed is not None and evidence.replayed.native is None
        if was_given and own is not None and under is not None and np.array_equal(own, under):
            advice = SAME_PASS
        yield Finding(Severity.NOTE, "replay", f"R3 makes little difference {tokens}: {both}.", advice)
    elif measures.rise is not None and measures.rise[0] <= SURE * measures.rise[1]:
        chance = "Replay is seen neither to help nor to harm: k3 rises by no more than chance makes of so few tokens"
        yield Finding(Severity.NOTE, "replay", f"{chance}; {both}.", TOO_FEW)
    else:
        yield Finding(
            Severity.PROBLEM,
            "replay",
            f"Replaying this trace makes it worse{f' by a factor of {1 / gain:.3g}' if gain > 0 else ''}: {both}.",
            NOT_THESE_ROUTES,
        )
    # what has a name above is not called by a guess here
    named = measures.shift is not None or measures.order is not None or bool(measures.zeros)
    if gain > 1 / HELPS and not named:
        yield from about_parts(measures, without, is_broken or replayed.f(2.0) >= MOST)
    if replayed.k3 > LARGE and gain > 1 / HELPS and not named:
        yield Finding(
            _by_probabilities(replayed, Severity.WARNING),
            "probabilities",
            f"Also on the engine's routes the probabilities are apart (k3 {replayed.k3:.2e} nats), by more than "
            "bfloat16 makes. Causes can be FP8, other weights where routes differ too, another temperature, or other "
            "tokens.",
            UNLIKE,
        )


def _by_probabilities(found: TokenMismatch, mildest: Severity) -> Severity:
    """Judge by how far apart probabilities are."""
    if found.f(2.0) >= MOST:
        return Severity.PROBLEM
    return max(mildest, Severity.WARNING) if found.k3 > LARGE else mildest


def _tail(*found: TokenMismatch) -> str:
    """Say F(2) where any token is in it."""
    shares = [each.f(2.0) for each in found]
    if not any(shares):
        return ""
    return ", F(2) " + (f"{shares[0]:.2%}" if len(shares) == 1 else f"from {shares[0]:.2%} to {shares[1]:.2%}")


def _quoted(message: str) -> str:
    """Put an error's text at the end of a sentence."""
    return message if message.rstrip().endswith((".", "?", "!")) else f"{message}."


def _trainer(measures: Measures) -> Iterator[Finding]:
    """Say how far the trainer is from itself, which no engine can undercut."""
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
                "Switch dropout and router jitter off; if they are, a kernel is not deterministic.",
            )
    if repacked is not None:
        routes = measures.repacked_routes
        share = f", and takes other experts in {routes.differing_share:.2%} of its routing decisions" if routes else ""
        # padding that is attended to moves k3 far more than another order of sums
        far = repacked.k3 >= LARGE / 10
        yield Finding(
            Severity.WARNING if far else Severity.FINE,
            "trainer",
            f"Packed one sequence at a time, the trainer differs from itself by k3 {repacked.k3:.2e}{share}. No engine "
            "can be closer than that.",
            "Check that padding is masked, and the trainer's precision: packing should not change a token."
            if far
            else "",
        )
