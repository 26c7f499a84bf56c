"""Findings about where a mismatch begins, and what would mend it: roots, and the parts of k3. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from foreroute.doctor.attribution import sentences
from foreroute.doctor.evidence import Finding, Measures, Severity, many
from foreroute.mismatch import Defect, Root, TokenMismatch

OF_ONE_PLACE = Defect.NONE, Defect.UNEXPLAINED, Defect.WEIGHT_VERSION
"""Defects of traces whose rows and layers are in their places."""
SHOWN = 3
"""Further roots that a finding names; the page has all."""
SURE = 3.0
"""Standard errors by which k3 must rise to be called harm. However large, one token alone makes it rise by one. What is
within as many of another verdict is too little to tell."""
ONE_PICK = (
    "A near-tie does not look so: look at what writes or moves these rows between the engine's router and the trace, "
    "and at the expert that was taken (an expert map, a load balancer, a buffer that is reused)."
)
ONE_ROUTER = (
    "Compare weight and selection bias of this router in the engine with the trainer's: a sync that left it out, "
    "weights that were quantised or converted, or a bias that was updated on one side."
)
TOO_FEW = "Measure more sequences: so few tokens do not tell what replay does."
MEND_FIRST = "Mend it, and run the doctor again: these parts are of a batch with the defect in it."
PARITY = (
    "See that both score at one temperature (--temperature of doctor). Then bring the engine nearer to the trainer: "
    "bfloat16 in the place of FP8, the same kernels and the same precision of router, attention and logits. Replay "
    "mends no more than its part."
)


def about_roots(measures: Measures) -> Iterator[Finding]:
    """Say where the trainer would choose otherwise on the engine's routes too, and what of that is no near-tie."""
    found = measures.roots
    # where rows or layers are mixed up every decision is another, and none stands out
    is_mixup = measures.explanation is not None and measures.explanation.defect not in OF_ONE_PLACE
    if found is None or is_mixup or not found.roots_L.any():
        return
    for layer, times in found.steep:
        yield Finding(
            Severity.WARNING,
            "routes",
            f"The router of {measures.layers[layer]} is not the engine's: on the engine's routes it would choose "
            f"otherwise for {found.share_L[layer]:.1%} of the tokens, {times:.1f} times as often as the median of the "
            "other layers.",
            ONE_ROUTER,
        )
    # what a wrong router picks is said of it
    far = [root for root in found.far if root.layer not in dict(found.steep)]
    if far:
        others = f" So are {_places(far[1:], measures)}." if far[1:] else ""
        yield Finding(
            Severity.WARNING,
            "routes",
            f"No near-tie: {_words(far[0], measures)}. Its deficit of {far[0].deficit:.3g} is "
            f"{far[0].deficit / found.median:.0f} times the median of {many(int(found.distinct_L.sum()), 'root')}; "
            f"roundings stay below {found.threshold / found.median:.0f} times it.{others}",
            ONE_PICK,
        )
    followed = ""
    if found.consequences_L is not None:
        followed = f"; {found.consequences_share:.1%} more differ in its own pass as a consequence"
    worst = f" The least like a near-tie: {_words(found.worst[0], measures)}." if found.worst and not far else ""
    # samples of one prompt share its rows
    roots, distinct = int(found.roots_L.sum()), int(found.distinct_L.sum())
    copies = f" ({distinct:,} where copies in samples of one prompt are one)" if distinct < roots else ""
    is_natural = measures.explanation is not None and measures.explanation.defect is Defect.NONE
    yield Finding(
        Severity.FINE if is_natural else Severity.NOTE,
        "routes",
        f"The mismatch of routes begins at {many(roots, 'root')}{copies}: on the engine's routes the trainer would "
        f"still choose otherwise in {found.share:.1%} of the routing decisions{followed}.{worst}",
    )


def about_parts(measures: Measures, without: TokenMismatch, is_broken: bool) -> Iterator[Finding]:
    """Say whether replay would pay, or parity, or neither before something is mended."""
    split = measures.split
    if split is None or without.k3 <= measures.floor:
        return
    share = f"{split.routing_share:.0%}" if split.routing > 0 else "nothing"
    parts = (
        f"routing makes {share} of k3 ({split.routing:.2e} of {without.k3:.2e} nats), and {split.rest:.2e} is left to "
        "gate weights, which no engine returns, and arithmetic"
    )
    if is_broken:
        yield Finding(Severity.NOTE, "replay", f"Something is broken. As it is, {parts}.", MEND_FIRST)
    elif measures.rise is not None and abs(split.routing - without.k3 / 2) <= SURE * measures.rise[1]:
        yield Finding(Severity.NOTE, "replay", f"Whether replay or parity would pay more is open: {parts}.", TOO_FEW)
    elif split.routing_share >= 0.5:
        yield Finding(Severity.NOTE, "replay", f"Replay pays: {parts}.")
    else:
        yield Finding(Severity.NOTE, "replay", f"Parity would pay more than replay: {parts}.", PARITY)
    if measures.attribution is not None:
        for sentence in sentences(measures.attribution, measures.layers):
            yield Finding(Severity.NOTE, "gap", sentence)


def _words(root: Root, measures: Measures) -> str:
    """Say where a root is, and what was taken there."""
    return (
        f"in {measures.layers[root.layer]}, at position {root.position} of sequence {root.sequence}, the engine took "
        f"{_experts(root.engine)} where the trainer takes {_experts(root.trainer)}"
    )


def _places(roots: list[Root], measures: Measures) -> str:
    shown = [
        f"{measures.layers[root.layer]}, position {root.position} of sequence {root.sequence}" for root in roots[:SHOWN]
    ]
    left = len(roots) - len(shown)
    return "; ".join(shown) + (f"; and {left} more" if left else "")


def _experts(experts: list[int]) -> str:
    return f"expert{'' if len(experts) == 1 else 's'} {', '.join(map(str, experts))}"
