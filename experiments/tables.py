"""The tables of the page, as rows of text."""

from __future__ import annotations

from experiments.arms import Arms, growth, over_steps, reward_first, reward_last, spikes, static
from experiments.claims import ENGINES, PASSES
from experiments.grid import ARMS, MINI_STEPS, PRECISIONS, REGIMES, ROUTINGS
from experiments.wording import interval_text, number, percent

Table = list[list[str]]


def static_table(arms: Arms) -> Table:
    """Part A: model, engine, replay, routers that differ, k3 and F."""
    rows = []
    for start in ("moe", "dense"):
        for precision in PRECISIONS:
            arm = f"A/{start}/{precision}"
            for replay in ("none", "R3", "R3+weights", "shifted"):
                k3 = arms.mean(arm, static(replay, "k3"))
                if not k3.seeds or (precision == "float32" and replay != "none"):  # nothing differs there
                    continue
                differing = arms.mean(arm, static(replay, "differing_share")).mean
                tails = [number(arms.mean(arm, static(replay, name)).mean) for name in ("f1.5", "f2")]
                routers = percent(differing) if start == "moe" and replay == "none" else "-"
                model = {"moe": "MoE", "dense": "dense"}[start]
                rows.append([model, precision, replay, routers, interval_text(k3), *tails])
    return rows


def replay_table(arms: Arms) -> Table:
    """Part B: mini-batches, correction, reward and k3 by routing, collapsed runs of all."""
    rows = []
    for mini_steps in MINI_STEPS:
        for correction, words in (("plain", "none"), ("tis", "TIS")):
            names = [f"B/{routing}/{correction}/{mini_steps}" for routing in ROUTINGS]
            if any(name in arms for name in names):
                figures = [number(arms.mean(name, f).mean) for f in (reward_last, over_steps("k3")) for name in names]
                collapsed, runs = (sum(counts) for counts in zip(*map(arms.collapsed, names), strict=True))
                rows.append([str(mini_steps), words, *figures, f"{collapsed}/{runs}"])
    return rows


def other_runs_table(arms: Arms) -> Table:
    """Parts C to E and G: arm, reward, k3, spikes, collapsed runs of all."""
    names = ["C/gspo/none", "C/gspo/R3", "D/frozen/none", "D/frozen/R3", "E/shifted/1", "E/shifted/8"]
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


def noise_table(arms: Arms) -> Table:
    """Part I: the trainer against the rollout, then the engine against itself; routers and k3, by engine."""
    passes = {"trainer": "the trainer, its own routes", "trainer R3": "the trainer, R3"}
    passes |= {name: f"the engine, {words}" for name, words in PASSES.items()}
    rows = []
    for name, words in passes.items():
        row = [words]
        for arm in ENGINES:
            routers, k3 = (arms.mean(arm, static(name, figure)).mean for figure in ("differing_share", "k3"))
            row += ["-" if name == "trainer R3" else percent(routers), number(k3)]
        rows.append(row)
    return rows if "I/bfloat16" in arms else []


def later_runs_table(arms: Arms) -> Table:
    """Parts J and K: arm, reward at first and at the end, k3, its growth, spikes, collapsed runs of all."""
    rows = []
    for name in (f"{part}/{arm}" for part in "JK" for arm in ARMS):
        if name in arms:
            label, reward, k3, *rest = _run_row(arms, name)
            first, grown = arms.mean(name, reward_first).mean, arms.mean(name, growth("k3")).mean
            rows.append([label, number(first), reward, k3, number(grown), *rest])
    return rows


def _run_row(arms: Arms, arm: str) -> list[str]:
    collapsed, runs = arms.collapsed(arm)
    return [
        f"`{arm}`",
        interval_text(arms.mean(arm, reward_last)),
        number(arms.mean(arm, over_steps("k3")).mean),
        percent(arms.mean(arm, spikes).mean),
        f"{collapsed}/{runs}",
    ]


def _reward_and_collapses(arms: Arms, arm: str) -> str:
    collapsed, runs = arms.collapsed(arm)
    return f"{number(arms.mean(arm, reward_last).mean)}; {collapsed}/{runs}" if runs else "-"
