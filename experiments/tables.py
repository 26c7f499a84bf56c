"""The tables of the page, as rows of text."""

from __future__ import annotations

from experiments.arms import Arms, over_steps, reward_last, reward_mean, spikes, static
from experiments.grid import MINI_STEPS, PRECISIONS, REGIMES, ROUTINGS
from experiments.wording import interval_text, number, percent

Table = list[list[str]]


def static_table(arms: Arms) -> Table:
    """Part A: model, engine, replay, seeds, routers that differ, k3 and F."""
    rows = []
    for start in ("moe", "dense"):
        for precision in PRECISIONS:
            arm = f"A/{start}/{precision}"
            for replay in ("none", "R3", "R3+weights", "shifted"):
                k3 = arms.mean(arm, static(replay, "k3"))
                if not k3.seeds:
                    continue
                differing = arms.mean(arm, static(replay, "differing_share")).mean
                tails = [interval_text(arms.mean(arm, static(replay, name))) for name in ("f1.5", "f2")]
                routers = percent(differing) if start == "moe" and replay == "none" else "-"
                model = {"moe": "MoE", "dense": "dense"}[start]
                rows.append([model, precision, replay, str(k3.seeds), routers, interval_text(k3), *tails])
    return rows


def grid_table(arms: Arms) -> Table:
    """Parts B to E and G: arm, seeds, reward, mismatch, spikes, collapses."""
    names = [f"B/{routing}/{c}/{n}" for n in MINI_STEPS for c in ("plain", "tis") for routing in ROUTINGS]
    names += ["C/gspo/none", "C/gspo/R3", "D/frozen/none", "D/frozen/R3", "E/shifted/1", "E/shifted/8"]
    names += ["G/none", "G/R3", "G/exact", "G/gspo/none", "G/gspo/R3"]
    return [_run_row(arms, name) for name in names if name in arms]


def boundary_table(arms: Arms) -> Table:
    """Part F: regime, and for each arm the reward and the collapses; then what R3 and exactness change."""
    rows = []
    regimes = {"part B, 8 mini-batches": ("B/none/plain/8", "B/R3/plain/8", "F/part B/exact")}
    regimes |= {name: (f"F/{name}/none", f"F/{name}/R3", f"F/{name}/exact") for name in REGIMES}
    for regime, (none, replayed, exact) in regimes.items():
        if not any(arm in arms for arm in (none, replayed, exact)):
            continue
        cells = [_reward_and_collapses(arms, arm) for arm in (none, replayed, exact)]
        changes = [arms.difference(arm, none, reward_last) for arm in (replayed, exact)]
        rows.append([regime, *cells, *(interval_text(c, signed=True) if c.seeds else "-" for c in changes)])
    return rows


def _run_row(arms: Arms, arm: str) -> list[str]:
    collapsed, runs = arms.collapsed(arm)
    return [
        f"`{arm}`",
        str(runs),
        interval_text(arms.mean(arm, reward_last)),
        number(arms.mean(arm, reward_mean).mean),
        number(arms.mean(arm, over_steps("k3")).mean),
        number(arms.mean(arm, over_steps("f2")).mean),
        percent(arms.mean(arm, spikes).mean),
        percent(arms.mean(arm, over_steps("clip_share")).mean),
        f"{collapsed} of {runs}",
    ]


def _reward_and_collapses(arms: Arms, arm: str) -> str:
    collapsed, runs = arms.collapsed(arm)
    return f"{interval_text(arms.mean(arm, reward_last))}; {collapsed} of {runs}" if runs else "-"
