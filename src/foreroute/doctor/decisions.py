"""Findings about the decisions of a rollout beside its routes: sampling masks, and choices of indexers. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from foreroute.doctor.evidence import EXPLAINS, Evidence, Finding, Measures, Severity, many
from foreroute.doctor.zeros import Zeros
from foreroute.mismatch.defects import listed
from foreroute.trace import INDEXER, SAMPLING

RECORD_CHOICES = (
    "Record them too: record(indexers=True), EmbeddedEngine(model, indexers=True), or SGLang with "
    "--enable-return-indexer-topk, which capture.decode reads."
)
OF_THEIR_TOKENS = (
    "Row p holds the set that token p + 1 was drawn from. Carry sets with their tokens, or record them again."
)
AS_SAMPLED = (
    "Give the doctor and the trainer the temperature that the engine sampled with, and have the engine return the "
    "log-probs of what it drew from: processed_logprobs of vLLM, output_token_sampling_logprobs of SGLang."
)
FILL_IN = (
    "Log-probs that nobody filled in are 0: make sure that each token has the one that was computed for it. An engine "
    "gives 0 itself for what it took greedily, at a temperature near 0 or with top_k of 1: leave such tokens out."
)
RECORD_MASKS = "Record sampling masks, and score tokens on them, or sample without top_p, top_k and min_p."
KEPT_MASS = 0.99
"""Mean ratio below which tokens were left out. Chosen by hand: precision leaves the mean at 1, and 4 standard errors
are allowed for beside it."""


def about_masks(evidence: Evidence, measures: Measures) -> Iterator[Finding]:
    """Say whether trainer and engine take probabilities of the same tokens, at the same temperature."""
    # first: where log-probs were never filled in, no other figure of them means anything
    for zeros in measures.zeros:
        yield Finding(Severity.PROBLEM, "probabilities", _zeros_words(zeros), FILL_IN)
    if evidence.mask_error:
        sentence = f"The sampling masks are not those of their tokens: {evidence.mask_error}."
        yield Finding(Severity.PROBLEM, "masks", sentence, OF_THEIR_TOKENS)
    has_masks = evidence.engine is not None and SAMPLING in evidence.engine.streams
    far = measures.with_replay
    # the mean ratio is 1 over tokens that both sides can draw, however noisy; below it some were left out
    ratio, error = (1.0, 0.0) if measures.ratio is None or has_masks else measures.ratio
    is_cut = ratio + 4 * error < KEPT_MASS
    if not is_cut and measures.rescored is not None and far is not None and measures.rescored[1].k3 * EXPLAINS < far.k3:
        other, found = measures.rescored
        on = " on the sampling masks" if other.on_sets else " over all tokens" if has_masks else ""
        yield Finding(
            Severity.PROBLEM,
            "masks" if has_masks else "temperature",
            f"The engine's log-probs fit a temperature of {other.temperature:g}{on}: k3 is {found.k3:.2e} nats so, "
            f"and {far.k3:.2e} as the trainer takes them{', on the sampling masks' if has_masks else ''}.",
            AS_SAMPLED,
        )
    elif is_cut:
        yield Finding(
            Severity.PROBLEM,
            "masks",
            f"Trainer over engine is {ratio:.3f} on average, where 1 is expected: the engine drew from "
            "fewer tokens than the trainer scores, by top-p, top-k or min-p, and the trace has no sampling masks.",
            RECORD_MASKS,
        )


def about_choices(evidence: Evidence, measures: Measures) -> Iterator[Finding]:
    """Say whether queries attend to the same units of their sequence in trainer and engine."""
    # a note and no warning: choices differ by roundings as picks of experts do
    if (found := measures.choices) is not None:
        yield Finding(
            Severity.FINE if not found.differing else Severity.NOTE,
            "indexers",
            f"Indexers chose other units in at least one layer of {found.differing} of {many(found.rows, 'row')}; "
            f"trainer and engine share {found.shared:.1%} of the units that queries attend to.",
        )
    # which alone can make replay worse
    elif evidence.has_indexers and evidence.engine is not None and INDEXER not in evidence.engine.streams:
        yield Finding(
            Severity.WARNING,
            "indexers",
            "The model has indexers of sparse attention, and the trace has none of their choices: under R3 queries of "
            "the trainer attend to other units than the engine's.",
            RECORD_CHOICES,
        )


def _zeros_words(zeros: Zeros) -> str:
    """Put log-probs of exactly 0 into a sentence."""
    where = ""
    if zeros.sequences is not None:
        where = f" of {many(len(zeros.sequences), 'sequence')} ({listed(zeros.sequences)})"
    whose = zeros.side[:1].upper() + zeros.side[1:]
    return (
        f"{whose} has log-probs of exactly 0, probability 1, for {many(zeros.count, 'response token')}{where}, where "
        f"{zeros.other} has {zeros.mean:.3g} on average."
    )
