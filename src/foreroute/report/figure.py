"""Shared parts of plots: colours, type sizes, legends, and what stands in place of a plot without data."""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.colors import TwoSlopeNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from foreroute.records import Run, StepRecord
from foreroute.records.step_record import SIDES, Side
from foreroute.report.format import INK, WINDOW, over_mean, step_time
from foreroute.report.page import Caption, Key, Plot
from foreroute.trace import RoutedLayer

# A colour stands for the same on every page. Okabe and Ito's stay apart under the common colour deficiencies.
SIDE_COLOURS: dict[Side, str] = {"native": "#D55E00", "replayed": "#0072B2"}
PART_COLOURS = {
    "attention": "#77AADD",
    "all-to-all": "#EE8866",
    "experts": "#BBCC33",
    "fixed": "#DDDDDD",
    "exposed transfers": "#AA4499",
    "output head": "#EEDD88",
    "waiting for the plan": "#332288",
}
"""Parts of the time, in Tol's light scheme, none of which is the colour of a method, and dark for waiting."""
SIDE_WORDS: dict[Side, str] = {"native": "without replay", "replayed": "with replay"}
DASHES = ("", "6 3", "2 2", "8 2 2 2")
"""By run, as in SVG; matplotlib takes the numbers."""
SHADES = (0.0, 0.45, -0.4)
"""By run among those that train on the same side: towards white, or black. With four dashes, twelve looks."""

INCHES = (5.0, 3.1)
HEAT_INCHES = (5.0, 4.2)
BAR_INCHES = 0.34
LABEL_WIDTH = 21
"""Characters of a line of a bar's label."""


@dataclass(frozen=True)
class Series:
    """One line of the run at this position of the report. Where x are edges, `y` has one entry less than `x`."""

    run: int
    side: Side | None
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def new_axes(inches: tuple[float, float] = INCHES) -> Any:
    """One pair of axes to draw on."""
    return Figure(figsize=inches).subplots()


def card(caption: Caption, drawn: Any, alt: str, keys: Sequence[Key] = (), notes: Sequence[str] = ()) -> Plot:
    """Make a card of axes, which get the caption's labels, or of a figure. `alt` is for those who do not see it."""
    figure = drawn
    if not isinstance(drawn, Figure):
        drawn.set_xlabel(caption.x_label)
        drawn.set_ylabel(caption.y_label)
        figure = drawn.figure
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib writes six decimals of a point; a tenth is less than a pixel, and a third of the bytes go
    small = re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d)\d+", rb"\1", path[0]), buffer.getvalue())
    # a page loads nothing, so pictures are in it
    image = "data:image/svg+xml;base64," + base64.b64encode(small).decode("ascii")
    return Plot(caption=caption, image=image, alt=f"{caption.title}. {alt}.", keys=tuple(keys), notes=tuple(notes))


def card_of_runs(
    caption: Caption,
    drawn: Any,
    runs: Sequence[Run],
    series: Sequence[Series],
    keys: Sequence[Key] = (),
) -> Plot:
    """Make a card with the legend of its runs, or `keys`; without a picture where no series has a number."""
    # infinite values would stretch the span that is told to those who see no picture
    values = [line.y[np.isfinite(line.y)] for line in series]
    if not any(finite.size for finite in values):
        return Plot(caption=caption)
    finite = np.concatenate(values)
    names = ", ".join(runs[position].label for position in sorted({line.run for line in series}))
    alt = f"{caption.y_label} against {caption.x_label}, from {finite.min():.3g} to {finite.max():.3g}, for {names}"
    return card(caption, drawn, alt, keys or _keys(runs, series), _notes(runs, series))


def plot_lines(
    caption: Caption,
    runs: Sequence[Run],
    series: Sequence[Series],
    finish: Callable[[Any], None] = lambda axes: None,
    *,
    smooth: bool = False,
) -> Plot:
    """Draw one line per series; `finish` sets limits and formats afterwards.

    With `smooth` a thick line is the mean of the last `WINDOW` values, and a thin one the values.
    """
    axes = new_axes()
    for line in series:
        look = style_of(runs, line)
        if smooth:
            axes.plot(line.x, line.y, color=look["color"], linewidth=0.7, alpha=0.3)
            means = [line.y[max(0, end - WINDOW) : end].mean() for end in range(1, len(line.y) + 1)]
            axes.plot(line.x, means, **look | {"linewidth": 2.2})
        else:
            axes.plot(line.x, line.y, **look)
    axes.xaxis.set_major_locator(integer_ticks(6))
    finish(axes)
    return card_of_runs(caption, axes, runs, series)


def series_by_run(runs: Sequence[Run], path: str) -> list[Series]:
    """One line of each run over its steps; a run that never recorded the figure has none."""
    return [line for position, run in enumerate(runs) for line in _series(position, run, None, path)]


def series_by_side(runs: Sequence[Run], measure: str) -> list[Series]:
    """One line of each run and side, over the steps at which that side was measured."""
    return [
        line
        for position, run in enumerate(runs)
        for side in SIDES
        for line in _series(position, run, side, f"mismatch.{side}.{measure}")
    ]


def _series(position: int, run: Run, side: Side | None, path: str) -> list[Series]:
    points = [(step.step, y) for step in run.steps if (y := _recorded(step, path)) is not None]
    return [Series(position, side, *np.array(points, np.float64).T)] if points else []


def _recorded(step: StepRecord, path: str) -> float | None:
    """The figure that a step recorded by this path of keys, joined by dots; of a list the last. None where none."""
    found: Any = step
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else getattr(found, key, None)
    return (found[-1] if found else None) if isinstance(found, list) else found


def colour_of(runs: Sequence[Run], position: int, side: Side | None = None) -> str:
    """The colour of a side, by default of that which the run trains with; runs of the same one differ in shade."""
    # runs of one side share its hue, so that side stays the first thing that is seen
    own = runs[position].trains_with
    rank = sum(run.trains_with == own for run in runs[:position])
    shade = SHADES[rank % len(SHADES)]
    towards = np.array([1.0, 1.0, 1.0] if shade > 0 else [0.0, 0.0, 0.0])
    return to_hex((1 - abs(shade)) * np.array(to_rgb(SIDE_COLOURS[side or own])) + abs(shade) * towards)


def dashes_of(position: int) -> str:
    """The dashes of a run, as in SVG; none of the first."""
    return DASHES[position % len(DASHES)]


def style_of(runs: Sequence[Run], line: Series) -> dict[str, Any]:
    """Colour by side, dashes by run. Points are marked where they are few."""
    dashes = dashes_of(line.run)
    return {
        "color": colour_of(runs, line.run, line.side),
        "linestyle": (0, [float(length) / 2 for length in dashes.split()]) if dashes else "-",
        "marker": "o" if len(line.x) < 30 else None,
        "markersize": 3.2,
        "markevery": max(1, len(line.x) // 30),
    }


def percent_axis(axes: Any) -> None:
    """Shares as percentages, from just below zero, so that a line of exact zeros stays clear of the axis."""
    # matplotlib leaves room above all data, also above 100 %
    top = min(axes.get_ylim()[1], 1.025)
    axes.set_ylim(-0.025 * top, top)
    percent_ticks(axes.yaxis)


def percent_ticks(axis: Any, decimals: int | None = None) -> None:
    """Shares as percentages."""
    axis.set_major_formatter(PercentFormatter(xmax=1, decimals=decimals, symbol=" %"))


def integer_ticks(most: int) -> MaxNLocator:
    """Ticks at whole numbers, also where there is one point; matplotlib alone would put fractions beside it."""
    return MaxNLocator(integer=True, nbins=most, min_n_ticks=1)


def layer_label(layers: Sequence[RoutedLayer]) -> str:
    """Label of an axis of routed layers: by the model's own numbers where its layers are known."""
    kinds = {layer.noun.removesuffix(" layer") for layer in layers}
    return f"{kinds.pop()} layer" if len(kinds) == 1 else "layer" if kinds else "routed layer, counted from 0"


def number_layers(axis: Any, layers: Sequence[RoutedLayer]) -> None:
    """Ticks of an axis on which the n-th routed layer is at n."""
    axis.set_major_locator(integer_ticks(8))
    if layers:
        names = [str(layer.index) for layer in layers]
        if len({layer.kind for layer in layers}) > 1:
            names = [str(layer) for layer in layers]
        axis.set_major_formatter(lambda value, _: names[round(value)] if 0 <= round(value) < len(names) else "")


def ticks_above_one(most: float) -> list[float]:
    """Ticks of a colour bar from 1 to `most`, none so near to 1 that its label would run into that of 1."""
    ticks = MaxNLocator(4).tick_values(1.0, most)
    return [float(tick) for tick in ticks if 1 + 0.15 * (most - 1) < tick <= most]


def heat_maps(
    caption: Caption,
    loads: Mapping[str, NDArray[np.float64]],
    *,
    below: bool = False,
    from_one: bool = False,
    layers: Sequence[RoutedLayer] = (),
) -> Plot:
    """Loads over the mean [y, x] by title, a panel each under one scale. Below 1, perfect balance, is blue, above red.

    The panels stand side by side, or `below` each other. The colour bar may begin at 1, which is white. `layers` are
    those of the y axis, where it has some.
    """
    # nearly even loads would otherwise look as uneven as any
    most = max(1.05, *(float(over.max()) for over in loads.values()))
    # below and above the mean are different things: ranks that wait, and those waited for
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=most)
    figure = Figure(figsize=HEAT_INCHES)
    panels = figure.subplots(*((len(loads), 1) if below else (1, len(loads))), sharex=True, sharey=True)
    for axes, (title, over) in zip(panels, loads.items(), strict=True):
        image = axes.imshow(over, norm=norm, cmap="RdBu_r", aspect="auto", interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=4)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(integer_ticks(5))
        number_layers(axes.yaxis, layers)
    for axes in panels[-1:] if below else panels:
        axes.set_xlabel(caption.x_label)
    figure.supylabel(caption.y_label, fontsize=11, color=INK)
    bar = figure.colorbar(image, ax=panels, location="bottom", fraction=0.05, pad=0.02, aspect=40)
    bar.set_label("load over mean")
    bar.outline.set_visible(False)
    bar.set_ticks([*([] if from_one else [0.0, 0.5]), 1.0, *ticks_above_one(most)])
    if from_one:
        bar.ax.set_xlim(1.0, most)
    spans = [f"{name} {over_mean(float(v.min()))} to {over_mean(float(v.max()))}" for name, v in loads.items()]
    return card(caption, figure, "; ".join(spans))


def stacked_bars(
    caption: Caption,
    bars: Sequence[tuple[str, Sequence[float]]],
    colours: Mapping[str, str],
    *,
    unit_s: float = 1.0,
    line_s: float | None = None,
    headings: Mapping[int, str] = MappingProxyType({}),
) -> Plot:
    """Bars of label and seconds of each part, from the top; parts that no bar has are left out.

    `colours` are by name of the part, in order. The axis is in units of `unit_s` seconds. The picture has a line at
    `line_s` seconds, and headings over bars by position.
    """
    widths_BX = np.array([seconds for _, seconds in bars], np.float64)
    totals_B = widths_BX.sum(axis=1)
    # A part below a thousandth of the longest bar would be thinner than a line.
    shown = [(x, name) for x, name in enumerate(colours) if widths_BX[:, x].max() > 1e-3 * totals_B.max()]
    # a heading takes the room of a bar
    places_B = np.array([place + sum(first <= place for first in headings) for place in range(len(bars))], np.float64)
    axes = new_axes((INCHES[0], max(INCHES[1], 0.8 + BAR_INCHES * (len(bars) + len(headings)))))
    left_B = np.zeros(len(bars))
    for x, name in shown:
        axes.barh(places_B, widths_BX[:, x] / unit_s, left=left_B, color=colours[name], height=0.66)
        left_B += widths_BX[:, x] / unit_s
    if line_s is not None:
        axes.axvline(line_s / unit_s, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    for place, total in zip(places_B, totals_B, strict=True):
        axes.annotate(
            step_time(total), (total / unit_s, place), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9.5, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )  # fmt: skip
    for first, heading in headings.items():
        axes.text(0, places_B[first] - 0.95, heading, va="center", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_yticks(places_B, [textwrap.fill(label, LABEL_WIDTH) for label, _ in bars], fontsize=9.5)
    axes.set_xlim(0, 1.16 * max(float(totals_B.max()), line_s or 0.0) / unit_s)
    axes.set_ylim(places_B[-1] + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    alt = ", ".join(f"{label} {step_time(total)}" for (label, _), total in zip(bars, totals_B, strict=True))
    return card(caption, axes, alt, [Key(name, colours[name]) for _, name in shown])


def _keys(runs: Sequence[Run], series: Sequence[Series]) -> tuple[Key, ...]:
    """Sides by colour, and runs by dashes; by both where no line is of a side."""
    drawn = sorted({line.run for line in series})
    sides = [side for side in SIDES if any(line.side == side for line in series)]
    several = drawn if len(runs) > 1 else []
    of_runs = [Key(runs[place].label, None, dashes_of(place)) if sides else run_key(runs, place) for place in several]
    return (*(Key(SIDE_WORDS[side], SIDE_COLOURS[side]) for side in sides), *of_runs)


def run_key(runs: Sequence[Run], position: int) -> Key:
    """Look of the line of a run that is of no side: its colour is that of the side which it trains with."""
    label = f"{runs[position].label}, trained {SIDE_WORDS[runs[position].trains_with]}"
    return Key(label, colour_of(runs, position), dashes_of(position))


def _notes(runs: Sequence[Run], series: Sequence[Series]) -> tuple[str, ...]:
    drawn = {line.run for line in series}
    silent = [run.label for place, run in enumerate(runs) if place not in drawn]
    notes = [f"Not recorded by: {', '.join(f'“{name}”' for name in silent)}."] if silent else []
    # matplotlib leaves these out silently
    lost = sum(int((~np.isfinite(line.y)).sum()) for line in series)
    if lost:
        notes.append(f"Not drawn: {lost} value{'s' if lost > 1 else ''} that are infinite or not a number.")
    return tuple(notes)
