"""The plots of the update: effective sample size, stale routes, what clipping holds back, distance to a reference."""

from __future__ import annotations

from collections.abc import Sequence

from foreroute.report.canvas import Caption, Plot, percent_axis
from foreroute.report.curves import STEP, lines, per_run
from foreroute.report.records import Run, Step

NEVER = "This was not recorded."


def objective_plots(runs: Sequence[Run]) -> list[Plot]:
    """Those that some run has something to show in; a bound that nothing ever reached is no plot."""
    plots = []
    effective = per_run(runs, _effective)
    if effective:
        plots.append(lines(_EFFECTIVE, runs, effective, percent_axis))
    live = per_run(runs, _live_agreement)
    if live:
        plots.append(lines(_LIVE, runs, live, percent_axis))
    for caption, value in ((_CLIPPED, _clipped), (_CUT, _cut)):
        series = per_run(runs, value)
        if any(line.y.any() for line in series):
            plots.append(lines(caption, runs, series, percent_axis))
    for caption, value in ((_REJECTED, _rejected), (_DIVERGENCE, _divergence)):
        series = per_run(runs, value)
        if any(line.y.any() for line in series):
            plots.append(lines(caption, runs, series))
    return plots


def _effective(step: Step) -> float | None:
    return None if step.importance is None else step.importance.effective_share


def _live_agreement(step: Step) -> float | None:
    return step.live_agreement[-1] if step.live_agreement else None


def _clipped(step: Step) -> float | None:
    return step.clip_share


def _cut(step: Step) -> float | None:
    return None if step.importance is None else step.importance.cut_share


def _rejected(step: Step) -> float | None:
    return None if step.importance is None else float(step.importance.rejected_sequences)


def _divergence(step: Step) -> float | None:
    return step.kl


_EFFECTIVE = Caption(
    title="Effective sample size",
    sentence="Tokens of equal weight that would be worth as much as the trained ones, as a share of them; 100 % where "
    "trainer and rollout engine give every token the same probability.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_LIVE = Caption(
    title="Live routes",
    sentence="Share of (token, layer) cells in which the policy's own experts, in the last mini-step of an update, are "
    "still the replayed ones.",
    x_label=STEP,
    y_label="share of (token, layer) cells",
    absent=NEVER,
)
_CLIPPED = Caption(
    title="Clipped tokens",
    sentence="Share of trained tokens whose update the clip bounds changed.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_CUT = Caption(
    title="Corrected tokens",
    sentence="Share of trained tokens whose importance weight was truncated or masked.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_REJECTED = Caption(
    title="Rejected responses",
    sentence="Responses that were not learned from, because trainer and rollout engine disagree about them too much.",
    x_label=STEP,
    y_label="responses",
    absent=NEVER,
)
_DIVERGENCE = Caption(
    title="Distance to the reference",
    sentence="Estimate of KL(policy || reference) on the trained tokens.",
    x_label=STEP,
    y_label="nats per response token",
    absent=NEVER,
)
