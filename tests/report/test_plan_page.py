"""The page of a plan: complete, self-contained, and safe to open; and its rows and sentences."""

import re
from dataclasses import replace

import numpy as np
import pytest
from jinja2 import UndefinedError

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import InputError
from foreroute.plan import Topology
from foreroute.report import TableRow, method_rows, plan_finding, plan_summary, write_plan_page
from foreroute.report import plan as plan_room
from foreroute.report.figure import integer_ticks, ticks_above_one
from foreroute.report.format import duration, over_mean, step_time, time_unit
from foreroute.report.plan import COLUMNS
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, facts_of, figures_of
from foreroute.simulate.methods import BALANCERS
from foreroute.trace import RoutedLayer
from tests.plan.random_plans import LINKS, random_counts, random_plan

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def case(topology=None, shape=(3, 2, 4, 8), *, known=True, empty=False):
    topology = topology or Topology(4, 2, 2, LINKS)
    counts = random_counts(0, shape, most=1 if empty else 900)
    plan = random_plan(counts, topology, seed=1, moves=4)
    step = facts_of(plan, counts, COSTS, previous_LE=np.ones((shape[1], shape[3]), np.int64) if known else None)
    problem = BalancerInput(counts, topology, plan.previous_home_LE)
    others = compare(problem, COSTS, {name: BALANCERS[name] for name in ("static", "eplb_micro_step")})
    ours = figures_of(plan, counts, COSTS, label="foreroute", planning_s=0.0123)
    return plan, step, [*others, ours]


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).replace("&#39;", "'")


def test_everything_is_on_the_page(tmp_path):
    plan, step, records = case()
    html = write_plan_page(plan, step, records, {"step": "3 micro-steps"}, tmp_path / "page.html").read_text()
    text = text_of(html)
    assert html.count("data:image/svg+xml;base64,") == 4
    assert "is not shown" not in html
    for sentence in (plan_finding(records), *plan_summary(plan, step, records)):
        assert re.sub(r"\s+", " ", sentence) in text
    for row in method_rows(records, step):
        assert list(row.cells) == list(COLUMNS)
        assert re.sub(r"\s+", " ", " ".join([row.label, *row.cells.values()])).strip() in text
    assert html.count('class="ours"') == 1
    assert "modelled" in text
    assert "3 micro-steps" in text
    assert not re.search(r"<script|<link|https?://|@import|url\(", html)


def test_the_same_plan_gives_the_same_page(tmp_path):
    given = case()
    pages = [write_plan_page(*given, {}, tmp_path / f"{n}.html").read_text() for n in range(2)]
    assert pages[0] == pages[1]


def test_rows_say_what_records_say():
    plan, step, records = case()
    static, _, ours, bound = method_rows(records, step)
    assert static.label == "static"
    assert static.cells["Speedup over static"] == "1.00\N{MULTIPLICATION SIGN}"
    assert static.cells["Planning time"] == ""
    assert static.cells["Slowest rank over mean"] == f"{records[0].imbalance_ML.mean():.3f}"
    assert ours.ours
    assert ours.cells["Experts fetched per cell"] == f"{plan.hosts.fetched_R.sum() / 6:.1f}"
    assert ours.cells["Speedup over static"] == f"{records[0].seconds / records[-1].seconds:.2f}\N{MULTIPLICATION SIGN}"
    assert ours.cells["Planning time"] == "12.3\N{NO-BREAK SPACE}ms"
    assert bound.cells["Step, modelled"] == step_time(step.least_seconds)
    assert bound.cells["In the worst cell"] == f"{step.least_over_mean_ML.max():.3f}"


def test_the_tile_of_time_names_the_strongest_rival_and_short_times_are_in_milliseconds(tmp_path):
    plan, step, records = case()
    html = write_plan_page(plan, step, records, {}, tmp_path / "page.html").read_text()
    rival = records[1]
    text = text_of(html).replace("\N{NO-BREAK SPACE}", " ")
    times = [step_time(s).replace("\N{NO-BREAK SPACE}", " ") for s in (records[-1].seconds, records[0].seconds)]
    assert all(time.endswith(" ms") for time in times), times
    with_rival = step_time(rival.seconds).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        f"time of the step, modelled {times[0]} {times[1]} without balancing, {with_rival} with {rival.label}" in text
    )


def test_layers_have_the_numbers_that_the_model_gives_them(tmp_path):
    plan, step, records = case()
    layers = (RoutedLayer(3), RoutedLayer(5))
    named = text_of(write_plan_page(plan, step, records, {}, tmp_path / "a.html", layers=layers).read_text())
    assert f"in {layers[most_uneven(records)]}, the most uneven layer" in named
    counted = text_of(write_plan_page(plan, step, records, {}, tmp_path / "b.html").read_text())
    assert f"in routed layer {most_uneven(records)}, counted from 0, the most uneven layer" in counted


def test_what_there_is_none_of_has_no_tile_and_no_words(tmp_path):
    plan, step, records = case(Topology(4, 4, 0, LINKS), known=False)
    text = text_of(write_plan_page(plan, step, records, {}, tmp_path / "page.html").read_text())
    assert "served on another node" not in text
    assert "step before by" not in " ".join(plan_summary(plan, step, records))


def test_one_empty_cell(tmp_path):
    plan, step, records = case(shape=(1, 1, 4, 8), known=False, empty=True)
    text = text_of(write_plan_page(plan, step, records, {}, tmp_path / "page.html").read_text())
    assert "the slowest rank has 1.000 times the mean load, and 1.000 times without balancing" in text


@pytest.mark.parametrize(
    ("plan_s", "static_s", "rival_s", "words"),
    [
        (1.0, 2.0, 1.5, "2.00 times as fast as static and 1.50 times as fast as the strongest other balancer, EPLB"),
        (1.0, 1.004, 0.5, "is as fast as static and 0.50 times as fast as the strongest other balancer, EPLB"),
        (1.0, 0.5, None, "is 0.50 times as fast as static; the slowest rank"),
    ],
)
def test_the_finding_is_beside_static_and_the_strongest_rival(plan_s, static_s, rival_s, words):
    _, _, (static, rival, ours) = case()
    others = [] if rival_s is None else [replace(priced(rival, rival_s), label="EPLB")]
    finding = plan_finding([priced(static, static_s), *others, priced(ours, plan_s)])
    assert words in finding
    assert finding.startswith("By the cost model, the step under this plan is ")
    assert ("strongest" in finding) is (rival_s is not None)


def priced(record, seconds):
    return replace(record, parts_MLSP=record.parts_MLSP * (seconds / record.seconds))


def most_uneven(records):
    return int(records[0].imbalance_ML.mean(axis=0).argmax())


def test_a_row_without_a_column_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_room, "method_rows", lambda *_: [TableRow(label="a", cells={})])
    with pytest.raises(UndefinedError, match="Slowest rank over mean"):
        write_plan_page(*case(), {}, tmp_path / "page.html")


def test_words_from_outside_are_text(tmp_path):
    html = write_plan_page(*case(), {"input": "<script>alert(1)</script>"}, tmp_path / "page.html").read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_a_folder_as_target_is_refused(tmp_path):
    with pytest.raises(InputError, match="is a folder"):
        write_plan_page(*case(), {}, tmp_path)


@pytest.mark.parametrize(
    ("value", "text"), [(3.21, "3.21 s"), (0.0456, "45.6 ms"), (7.89e-5, "78.9 us"), (1.0, "1 s"), (0.001, "1 ms")]
)
def test_short_times(value, text):
    assert duration(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.00123, "1.23 ms"), (5.678, "5.68 s"), (14.0, "14.0 s"), (1234.5, "1,234 s")]
)
def test_seconds_of_a_step(value, text):
    assert step_time(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("most", "unit"), [(3.0, ("s", 1.0)), (0.002, ("ms", 1e-3)), (2e-9, ("us", 1e-6)), (0.0, ("us", 1e-6))]
)
def test_an_axis_of_times_has_the_unit_of_its_end(most, unit):
    assert time_unit(most) == unit


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.000"), (1.02004, "1.020"), (12.34, "12.3")])
def test_loads_over_the_mean(value, text):
    assert over_mean(value) == text


def test_no_label_of_a_colour_bar_runs_into_that_of_one():
    assert ticks_above_one(3.2)[0] == pytest.approx(1.8), "matplotlib's first, 1.2, is too near"
    for most in (1.05, 2.0, 9.0):
        assert ticks_above_one(most), most
        assert all(0.15 < (tick - 1) / (most - 1) <= 1 for tick in ticks_above_one(most)), most


def test_one_micro_step_has_one_tick():
    ticks = integer_ticks(8).tick_values(-0.5, 0.5)
    assert [tick for tick in ticks if -0.5 < tick < 0.5] == [0]
    assert len(integer_ticks(8).tick_values(0, 100)) > 4
