"""Draws docs/replay-k3.svg, the picture of README.md, from a finished demo.

python make/readme_picture.py runs/demo/DATE/R3
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterMathtext

from foreroute.records.runs import read_run
from foreroute.records.step_record import SIDES, Side

TO = Path(__file__).parents[1] / "docs" / "replay-k3.svg"
LOOKS: dict[Side, tuple[str, str]] = {"native": ("without replay", "#D55E00"), "replayed": ("with replay", "#0072B2")}


def draw(run: Path) -> Figure:
    """k3 of each step of a run that was measured both ways, on the same rollouts and weights, with means."""
    steps = [step for step in read_run(run).steps if step.mismatch]
    figure = Figure(figsize=(8.4, 2.7), layout="constrained")
    axes = figure.add_subplot()
    for side in SIDES:
        words, colour = LOOKS[side]
        k3 = [step.mismatch[side].k3 for step in steps]
        mean = sum(k3) / len(k3)
        axes.plot([step.step for step in steps], k3, color=colour, linewidth=1.3)
        axes.annotate(
            f"{words}\nmean {mean:.1e}", (1.01, mean), xycoords=("axes fraction", "data"), color=colour, va="center"
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatterMathtext())
    axes.set_xlim(0, steps[-1].step)
    axes.set_xlabel("training step")
    axes.set_ylabel("k3, nats per token")
    axes.set_title("Distance between trainer and rollout engine, on the same tokens", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e9ed")
    return figure


if __name__ == "__main__":
    with rc_context({"svg.hashsalt": "foreroute", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        draw(Path(sys.argv[1])).savefig(TO, metadata={"Date": None}, facecolor="white")
