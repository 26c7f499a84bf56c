"""The page of a plan: complete, self-contained, and safe to open; and its rows and sentences."""

import re

import numpy as np
import pytest

from foreroute.costs.figures import summarize
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import InputError
from foreroute.plan import Topology
from foreroute.planner.balancers import BALANCERS, BalancerInput
from foreroute.planner.compare import compare, record_of
from foreroute.report import method_rows, plan_summary, write_plan_page
from foreroute.report.figure import integer_ticks, ticks_above_one
from foreroute.report.format import duration, over_mean, step_seconds, step_time
from foreroute.trace import RoutedLayer
from tests.plan.random_plans import LINKS, random_counts, random_plan

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def case(topology=None, shape=(3, 2, 4, 8), *, known=True, empty=False):
    topology = topology or Topology(4, 2, 2, LINKS)
    counts = random_counts(0, shape, most=1 if empty else 900)
    plan = random_plan(counts, topology, seed=1, moves=4)
    seen = summarize(plan, counts, COSTS, previous_LE=np.ones((shape[1], shape[3]), np.int64) if known else None)
    problem = BalancerInput(counts, topology, plan.previous_home_LE)
    others = compare(problem, COSTS, {name: BALANCERS[name] for name in ("static", "eplb_micro_step")})
    ours = record_of(plan, counts, COSTS, label="foreroute", planning_s=0.0123)
    return plan, seen, [*others, ours]


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).replace("&#39;", "'")


def test_everything_is_on_the_page(tmp_path):
    plan, seen, records = case()
    html = write_plan_page(plan, seen, records, {"step": "3 micro-steps"}, tmp_path / "page.html").read_text()
    text = text_of(html)
    assert html.count("data:image/svg+xml;base64,") == 9
    assert 'class="absent"' not in html
    for sentence in plan_summary(plan, seen):
        assert re.sub(r"\s+", " ", sentence) in text
    for row in method_rows(records, seen):
        first = [row.cells[heading] for heading in ("Over mean", "p99", "Worst", "Modelled s", "Static / this")]
        assert " ".join([row.label, *first]) in text
    assert html.count('class="ours"') == 1
    assert "modelled" in text
    assert "3 micro-steps" in text
    assert not re.search(r"<script|<link|https?://|@import|url\(", html)


def test_the_same_plan_gives_the_same_page(tmp_path):
    given = case()
    pages = [write_plan_page(*given, {}, tmp_path / f"{n}.html").read_text() for n in range(2)]
    assert pages[0] == pages[1]


def test_rows_say_what_records_say():
    plan, seen, records = case()
    static, _, ours, bound = method_rows(records, seen)
    assert static.label == "static"
    assert static.cells["Static / this"] == "1.00"
    assert static.cells["Planned in"] == ""
    assert static.cells["Over mean"] == f"{seen.before.imbalance_ML.mean():.3f}"
    assert ours.ours
    assert ours.cells["Moves a cell"] == f"{plan.fetched_R.sum() / 6:.1f}"
    assert ours.cells["Static / this"] == f"{seen.before.seconds / seen.after.seconds:.2f}"
    assert ours.cells["Planned in"] == "12.3\N{NO-BREAK SPACE}ms"
    assert bound.cells["Modelled s"] == step_seconds(seen.least_seconds)
    assert bound.cells["Worst"] == f"{seen.bound_ML.max():.3f}"


def test_the_tile_of_time_names_the_strongest_rival_and_short_times_are_in_milliseconds(tmp_path):
    plan, seen, records = case()
    html = write_plan_page(plan, seen, records, {}, tmp_path / "page.html").read_text()
    rival = records[1]
    text = text_of(html).replace("\N{NO-BREAK SPACE}", " ")
    times = [step_time(s).replace("\N{NO-BREAK SPACE}", " ") for s in (seen.after.seconds, seen.before.seconds)]
    assert all(time.endswith(" ms") for time in times), times
    with_rival = step_time(rival.seconds).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        f"time of the step, modelled {times[0]} {times[1]} without balancing, {with_rival} with {rival.label}" in text
    )


def test_layers_have_the_numbers_that_the_model_gives_them(tmp_path):
    plan, seen, records = case()
    layers = (RoutedLayer(3), RoutedLayer(5))
    named = text_of(write_plan_page(plan, seen, records, {}, tmp_path / "a.html", layers=layers).read_text())
    assert f"in {layers[seen.most_uneven_layer]}, the most uneven layer" in named
    counted = text_of(write_plan_page(plan, seen, records, {}, tmp_path / "b.html").read_text())
    assert f"in routed layer {seen.most_uneven_layer}, counted from 0, the most uneven layer" in counted


def test_what_is_missing_is_said(tmp_path):
    plan, seen, records = case(Topology(4, 4, 0, LINKS), known=False)
    html = write_plan_page(plan, seen, records, {}, tmp_path / "page.html").read_text()
    assert "The step before was not given." in html
    assert "All ranks are in one node" in html
    assert "The plan has no replicas." in html
    assert html.count('class="absent"') == 2
    assert "another node" not in " ".join(plan_summary(plan, seen))
    assert "step before by" not in " ".join(plan_summary(plan, seen))


def test_one_empty_cell(tmp_path):
    plan, seen, records = case(shape=(1, 1, 4, 8), known=False, empty=True)
    html = write_plan_page(plan, seen, records, {}, tmp_path / "page.html").read_text()
    assert "The step has no assignments." in html
    assert plan_summary(plan, seen)[1].startswith("The slowest rank has 1.000 times the mean load without balancing")


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


@pytest.mark.parametrize(("value", "text"), [(0.00123, "0.00123"), (5.678, "5.68"), (14.0, "14.0"), (1234.5, "1,234")])
def test_seconds_of_a_step(value, text):
    assert step_seconds(value) == text


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
