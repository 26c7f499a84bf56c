"""Parts that plots of several pages share: colours, sizes, cards, axes, heat maps and stacked bars.

matplotlib is imported where something is drawn: tables of the same pages are printed without it.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.records.step_record import Side
from foreroute.report.format import INK, over_mean, step_time
from foreroute.report.page import Caption, Key, Plot

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
INCHES = (5.0, 3.1)
HEAT_INCHES = (5.0, 4.2)
BAR_INCHES = 0.34
LABEL_WIDTH = 21
"""Characters of a line of a bar's label."""


def new_axes(inches: tuple[float, float] = INCHES) -> Any:
    """One pair of axes to draw on."""
    return new_figure(inches).subplots()


def new_figure(inches: tuple[float, float]) -> Any:
    """A figure without axes."""
    from matplotlib.figure import Figure

    return Figure(figsize=inches)


def card(caption: Caption, drawn: Any, alt: str, keys: Sequence[Key] = (), notes: Sequence[str] = ()) -> Plot:
    """Make a card of axes, which get the caption's labels, or of a figure. `alt` is for those who do not see it."""
    if drawn.figure is not drawn:
        drawn.set_xlabel(caption.x_label)
        drawn.set_ylabel(caption.y_label)
    buffer = io.BytesIO()
    drawn.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # matplotlib writes six decimals of a point; a tenth is less than a pixel, and a third of the bytes go
    small = re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d)\d+", rb"\1", path[0]), buffer.getvalue())
    # a page loads nothing, so pictures are in it
    image = "data:image/svg+xml;base64," + base64.b64encode(small).decode("ascii")
    return Plot(caption=caption, image=image, alt=f"{caption.title}. {alt}.", keys=tuple(keys), notes=tuple(notes))


def percent_axis(axes: Any) -> None:
    """Shares as percentages, from just below zero, so that a line of exact zeros stays clear of the axis."""
    # matplotlib leaves room above all data, also above 100 %
    top = min(axes.get_ylim()[1], 1.025)
    axes.set_ylim(-0.025 * top, top)
    percent_ticks(axes.yaxis)


def percent_ticks(axis: Any) -> None:
    """Shares as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %"))


def integer_ticks(most: int) -> Any:
    """Ticks at whole numbers, also where there is one point; matplotlib alone would put fractions beside it."""
    return ticks(most, integer=True, min_n_ticks=1)


def ticks(most: int, **how: Any) -> Any:
    """At most this many ticks, at round numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=most, **how)


def layer_label(layers: Sequence[object]) -> str:
    """Label of an axis of routed layers, written as a kind and the model's own number where they are known."""
    kinds = {str(layer).rpartition(" ")[0].removesuffix(" layer") for layer in layers}
    return f"{kinds.pop()} layer" if len(kinds) == 1 else "layer" if kinds else "routed layer, counted from 0"


def number_layers(axis: Any, layers: Sequence[object]) -> None:
    """Ticks of an axis on which the n-th routed layer is at n; with its kind where there are several."""
    axis.set_major_locator(integer_ticks(8))
    if layers:
        kinds, _, numbers = zip(*(str(layer).rpartition(" ") for layer in layers), strict=True)
        names = numbers if len(set(kinds)) == 1 else [str(layer) for layer in layers]
        axis.set_major_formatter(lambda value, _: names[round(value)] if 0 <= round(value) < len(names) else "")


def heat_maps(
    caption: Caption,
    loads: Mapping[str, NDArray[np.float64]],
    *,
    below: bool = False,
    layers: Sequence[object] = (),
) -> Plot:
    """Loads over the mean [y, x] by title, a panel each under one scale. Below 1, perfect balance, is blue, above red.

    The panels stand side by side, or `below` each other. `layers` are those of the y axis, where it has some.
    """
    from matplotlib.colors import TwoSlopeNorm

    # nearly even loads would otherwise look as uneven as any
    most = max(1.05, *(float(over.max()) for over in loads.values()))
    # below and above the mean are different things: ranks that wait, and those waited for
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=most)
    figure = new_figure(HEAT_INCHES)
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
    # none so near to 1 that its label would run into that of 1
    above = [float(tick) for tick in ticks(4).tick_values(1.0, most) if 1 + 0.15 * (most - 1) < tick <= most]
    bar.set_ticks([0.0, 0.5, 1.0, *above])
    spans = [f"{name} {over_mean(float(v.min()))} to {over_mean(float(v.max()))}" for name, v in loads.items()]
    return card(caption, figure, "; ".join(spans))


def stacked_bars(
    caption: Caption,
    bars: Sequence[tuple[str, Sequence[float]]],
    colours: Mapping[str, str],
    *,
    unit_s: float = 1.0,
    headings: Mapping[int, str] = MappingProxyType({}),
) -> Plot:
    """Bars of label and seconds of each part, from the top; parts that no bar has are left out.

    `colours` are by name of the part, in order. The axis is in units of `unit_s` seconds. The picture has headings over
    bars by position.
    """
    widths_BX = np.array([seconds for _, seconds in bars], np.float64)
    totals_B = widths_BX.sum(axis=1)
    # A part below a thousandth of the longest bar would be thinner than a line.
    shown = [(x, name) for x, name in enumerate(colours) if widths_BX[:, x].max() > 1e-3 * totals_B.max()]
    # a heading takes the room of a bar
    at_B = np.array([at + sum(first <= at for first in headings) for at in range(len(bars))], np.float64)
    axes = new_axes((INCHES[0], max(INCHES[1], 0.8 + BAR_INCHES * (len(bars) + len(headings)))))
    left_B = np.zeros(len(bars))
    for x, name in shown:
        axes.barh(at_B, widths_BX[:, x] / unit_s, left=left_B, color=colours[name], height=0.66)
        left_B += widths_BX[:, x] / unit_s
    for at, total in zip(at_B, totals_B, strict=True):
        axes.annotate(
            step_time(total), (total / unit_s, at), xytext=(5, 0), textcoords="offset points", va="center",
            fontsize=9.5, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )  # fmt: skip
    for first, heading in headings.items():
        axes.text(0, at_B[first] - 0.95, heading, va="center", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_yticks(at_B, [textwrap.fill(label, LABEL_WIDTH) for label, _ in bars], fontsize=9.5)
    axes.set_xlim(0, 1.16 * float(totals_B.max()) / unit_s)
    axes.set_ylim(at_B[-1] + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(ticks(4))
    alt = ", ".join(f"{label} {step_time(total)}" for (label, _), total in zip(bars, totals_B, strict=True))
    return card(caption, axes, alt, [Key(name, colours[name]) for _, name in shown])
