"""The page of a plan, its rows, tiles and finding; and how numbers look on every page."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.plan import Topology
from foreroute.report.figure import integer_ticks, ticks_above_one
from foreroute.report.format import duration, over_mean, percentage, step_time, time_unit
from foreroute.report.plan import plan_finding, plan_table, plan_tiles, write_plan_page
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, facts_of, figures_of
from foreroute.simulate.methods import BALANCERS
from foreroute.trace import RoutedLayer
from tests.plan.random_plans import LINKS, random_counts, random_plan
from tests.report.pages import rows_of, text_of

COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def case(topology=None, shape=(3, 2, 4, 8), *, empty=False):
    topology = topology or Topology(4, 2, 2, LINKS)
    counts = random_counts(0, shape, most=1 if empty else 900)
    plan = random_plan(counts, topology, seed=1, moves=4)
    step = facts_of(plan, counts, COSTS)
    problem = BalancerInput(counts, topology, plan.previous_home_LE)
    others = compare(problem, COSTS, {name: BALANCERS[name] for name in ("static", "eplb_micro_step")})
    ours = figures_of(plan, counts, COSTS, label="foreroute", planning_s=0.0123)
    return plan, step, [*others, ours]


def cells(table, label):
    """A row by its label: cells by heading."""
    place = table.column("Method").index(label)
    return {column.heading: cell for column, cell in zip(table.columns, table.rows[place].cells, strict=True)}


def test_everything_is_on_the_page(tmp_path):
    plan, step, records = case()
    html = write_plan_page(plan, step, records, {"step": "3 micro-steps"}, tmp_path / "page.html").read_text()
    text, table = text_of(html), plan_table(records, step)
    assert html.count("data:image/svg+xml;base64,") == 3
    assert "is not shown" not in html
    assert plan_finding(records) in text
    for tile in plan_tiles(plan, step, records):
        assert f"{tile.name} {tile.value} {tile.against}".strip().replace("\N{NO-BREAK SPACE}", " ") in text
    shown = rows_of(html)
    for row in table.rows:
        assert shown[row.cells[0]] == [cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row.cells[1:]]
    assert [row.strong for row in table.rows] == [False, False, True, False]
    assert "3 micro-steps" in text


def test_rows_say_what_records_say():
    plan, step, records = case()
    table = plan_table(records, step)
    static, ours, bound = (cells(table, label) for label in ("static", "foreroute", "no plan beats"))
    assert static["Speedup over static"] == "1.00\N{MULTIPLICATION SIGN}"
    assert static["Planning time"] == ""
    assert static["Slowest rank over mean"] == f"{records[0].imbalance_ML.mean():.3f}"
    assert ours["Experts fetched per cell"] == f"{plan.hosts.fetched_R.sum() / 6:.1f}"
    assert ours["Speedup over static"] == f"{records[0].seconds / records[-1].seconds:.2f}\N{MULTIPLICATION SIGN}"
    assert ours["Planning time"] == "12.3\N{NO-BREAK SPACE}ms"
    assert bound["Step, modelled"] == step_time(step.least_seconds)
    assert bound["In the worst cell"] == f"{step.least_over_mean_ML.max():.3f}"


def test_tiles_say_what_no_row_says():
    plan, step, records = case()
    replicas, gap = plan_tiles(plan, step, records)
    gap_ML = records[-1].imbalance_ML / step.least_over_mean_ML - 1
    assert replicas.value == f"{plan.num_replicas_ML.mean():.1f}"
    assert (gap.value, gap.against.split(" at most")[0]) == tuple(map(percentage, (np.median(gap_ML), gap_ML.max())))


@pytest.mark.usefixtures("unpainted")
def test_layers_have_the_numbers_that_the_model_gives_them(tmp_path):
    plan, step, records = case()
    layers = (RoutedLayer(3), RoutedLayer(5))
    named = text_of(write_plan_page(plan, step, records, {}, tmp_path / "a.html", layers=layers).read_text())
    assert f"in {layers[most_uneven(records)]}, the most uneven layer" in named
    counted = text_of(write_plan_page(plan, step, records, {}, tmp_path / "b.html").read_text())
    assert f"in routed layer {most_uneven(records)}, counted from 0, the most uneven layer" in counted


def test_one_empty_cell(tmp_path):
    plan, step, records = case(shape=(1, 1, 4, 8), empty=True)
    text = text_of(write_plan_page(plan, step, records, {}, tmp_path / "page.html").read_text())
    assert "the slowest rank has 1.000 times the mean load, and 1.000 times without balancing" in text


@pytest.mark.parametrize(
    ("plan_s", "static_s", "rival_s", "words"),
    [
        (1.0, 2.0, 1.5, "2.00 times as fast as static and 1.50 times as fast as the strongest other balancer, EPLB"),
        (1.0, 1.004, 0.5, "is as fast as static and 0.50 times as fast as the strongest other balancer, EPLB"),
        (1.0, 0.99, 1.02, "is 0.99 times as fast as static and 1.02 times as fast as the strongest other balancer"),
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


SHOWN = {
    duration: [(3.21, "3.21 s"), (0.0456, "45.6 ms"), (7.89e-5, "78.9 us"), (1.0, "1 s"), (0.001, "1 ms")],
    step_time: [(0.00123, "1.23 ms"), (5.678, "5.68 s"), (14.0, "14.0 s"), (1234.5, "1,234 s")],
    over_mean: [(1.0, "1.000"), (1.02004, "1.020"), (12.34, "12.3")],
}


@pytest.mark.parametrize(("shown", "value", "text"), [(shown, *case) for shown in SHOWN for case in SHOWN[shown]])
def test_numbers_have_the_digits_and_units_that_suit_them(shown, value, text):
    assert shown(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("most", "unit"), [(3.0, ("s", 1.0)), (0.002, ("ms", 1e-3)), (2e-9, ("us", 1e-6)), (0.0, ("us", 1e-6))]
)
def test_an_axis_of_times_has_the_unit_of_its_end(most, unit):
    assert time_unit(most) == unit


def test_no_label_of_a_colour_bar_runs_into_that_of_one():
    assert ticks_above_one(3.2)[0] == pytest.approx(1.8), "matplotlib's first, 1.2, is too near"
    for most in (1.05, 2.0, 9.0):
        assert ticks_above_one(most), most
        assert all(0.15 < (tick - 1) / (most - 1) <= 1 for tick in ticks_above_one(most)), most


def test_one_micro_step_has_one_tick():
    ticks = integer_ticks(8).tick_values(-0.5, 0.5)
    assert [tick for tick in ticks if -0.5 < tick < 0.5] == [0]
    assert len(integer_ticks(8).tick_values(0, 100)) > 4
