"""The page of a simulation: its numbers are those of the records, and it says what is missing."""

import re
from dataclasses import replace

import pytest

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.plan.capabilities import SEVERAL_NODES
from foreroute.report.simulation import (
    HEADINGS,
    executed,
    simulation_finding,
    simulation_table,
    simulation_tiles,
    write_simulation_page,
)
from foreroute.simulate import SimulatedMethod, SimulationRecord, parse_config
from foreroute.simulate.engine import PARTS
from foreroute.simulate.methods import METHODS, PRESETS
from foreroute.simulate.records import PhaseSeconds, compared
from tests.report.pages import plots_of, rows_of, text_of

TRAINING = {"static": 17.72, "eplb_previous": 15.6, "laer": 13.9, "llep": 14.9, "ours": 13.21, "ours_rehomed": 13.2}
TRAINING |= {"eplb_micro_step": 13.18, "ours_traffic": 9.8}
"""Seconds of recompute and update."""
LABELS = {name: method.label for name, method in (METHODS | OTHER_BALANCERS).items()}
FORCED, BOUND = 13.1, 6.2


def config(**tables):
    values = {"cluster": {"gpus": 64, "expert_parallel": 16}, "workload": {"tokens_per_rank": 8192}}
    return parse_config(values | tables, source="the test")


def method(name):
    """A fifth of recompute and update is recompute; parts are shares of these. Other balancers are not executed."""
    training = TRAINING[name]
    waits = 0.0 if name == "static" else 0.0123
    shares = [0.35, 0.3, 0.28, 0.03, 0.0, 0.04, 0.0]
    recompute, update = 0.2 * training, 0.8 * training
    parts = [dict(zip(PARTS, [share * s for share in shares], strict=True)) for s in (recompute, update)]
    parts[0]["waiting for the plan"] = waits
    phases = PhaseSeconds(waits, 0.31 if name == "ours_rehomed" else 0.0, 0.0, recompute, update, 0.42, 0.011)
    return SimulatedMethod(
        name=name,
        label=LABELS[name],
        not_executed=() if name == "static" or name in PRESETS else ("plans of other balancers",),
        phases=phases,
        recompute_parts=parts[0],
        update_parts=parts[1],
        imbalance=2.09 if name == "static" else 1.02,
        imbalance_99=2.5,
        imbalance_worst=3.0,
        cross_node_share=0.25,
        home_moves=0,
        share_of_forced_balance=FORCED / training,
        share_of_bound=BOUND / training,
        speedup_over_static=TRAINING["static"] / training,
        groups_waiting=0.012,
        planning_s=0.0 if name == "static" else 2.13,
        fetches_per_cell=0.0 if name == "static" else 3.1,
        moved_bytes={"rows": {"node": 2.5e9, "cluster": 1.25e9}},
        gpu_hours=sum(phases) * 64 / 3600,
        gpu_hours_saved=(TRAINING["static"] + 0.431 - sum(phases)) * 64 / 3600,
    )


def record(names=tuple(TRAINING)):
    return SimulationRecord(
        facts={"cluster": "64 x h100, expert parallel 16", "model": "qwen3-30b-a3b: 48 routed layers"},
        gpus=64,
        expert_parallel=16,
        groups=4,
        groups_simulated=2,
        tokens_per_rank=8190.25,
        cells_per_group=1536,
        forced_balance_s=FORCED,
        bound_s=BOUND,
        rollout_s=0.0,
        methods=tuple(map(method, names)),
    )


SHOWN = {
    "Executed": lambda m: "no" if m.not_executed else "yes",
    "Recompute and update, modelled": lambda m: m.training_s,
    "Speedup over static": lambda m: m.speedup_over_static,
    "Share of forced balance": lambda m: 100 * m.share_of_forced_balance,
    "Share of the bound": lambda m: 100 * m.share_of_bound,
    "Slowest rank over mean": lambda m: m.imbalance,
    "Wait for the plan": lambda m: 1e3 * m.phases.planning,
    "Home moves": lambda m: 1e3 * m.phases.home_moves,
    "Exposed transfers": lambda m: 100 * m.exposed_share,
    "Groups wait": lambda m: 100 * m.groups_waiting,
    "Experts fetched per cell": lambda m: m.fetches_per_cell,
    "Planning time": lambda m: m.planning_s,
    "GPU-hours saved": lambda m: 100 * m.gpu_hours_saved / record()["static"].gpu_hours,
}


def page(folder, found=None, **parts):
    return write_simulation_page(found or record(), config(), folder / "page.html", **parts).read_text()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return page(tmp_path_factory.mktemp("page"))


def cells_of(html, label):
    """Numbers, yes and no of a row of the table by their column, as text; empty cells left out."""
    cells = dict(zip(HEADINGS[1:], rows_of(html)[label], strict=True))
    return {name: re.match(r"-?[\d.]+|yes|no", value)[0] for name, value in cells.items() if value}


def rounds_to(text, value):
    """Whether a number is printed with all the digits that it shows."""
    if text in ("yes", "no"):
        return text == value
    decimals = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.501 * 10**-decimals


def test_numbers_of_the_table_are_those_of_the_records(full):
    for method in record().methods:
        cells = cells_of(full, method.label)
        known = {name: of(method) for name, of in SHOWN.items()}
        if method.name == "static":
            del known["Wait for the plan"], known["Planning time"], known["GPU-hours saved"]
        if not method.phases.home_moves:
            del known["Home moves"]
        assert set(cells) == set(known)
        assert [name for name, text in cells.items() if not rounds_to(text, known[name])] == []
        assert rounds_to(cells["Speedup over static"], 17.72 / TRAINING[method.name])
    assert cells_of(full, "forced balance")["Share of forced balance"] == "100.0"
    assert cells_of(full, "lower bound")["Share of the bound"] == "100.0"
    assert {cells_of(full, limit)["Executed"] for limit in ("forced balance", "lower bound")} == {"no"}


def test_tiles_and_sentences_are_on_the_page(full):
    text, found = text_of(full), record()
    hours, all_hours = ((17.72 - 13.21 - 0.0123) * 64 / 3600, found["static"].gpu_hours)
    saved = f"{1000 * hours:.3g} of {1000 * all_hours:.3g} for whole steps without balancing, by foreroute"
    assert f"GPU-hours saved in 1000 steps {saved}" in text
    assert "cells of a group in a step 1,536 2 of 4 groups simulated" in text
    assert simulation_finding(found) in text
    assert executed(found) in text


def test_pictures_show_the_records(full):
    seen = plots_of(full)
    assert "static 18.2 s, EPLB, previous step (not executed) 16.0 s" in seen["The step by method"]
    assert seen["What recompute and update are spent on"].startswith("static 3.54 s, foreroute 2.65 s, ")


@pytest.mark.parametrize(
    ("names", "shown", "finding"),
    [
        (("static",), [], "forced balance would make recompute and update 1.35 times as fast as static; no other"),
        (("static", "llep", "laer"), ["laer"], "LAER-style (not executed) makes recompute and update 1.27 times"),
        (
            ("static", "ours", "llep"),
            ["ours", "llep"],
            "1.34 times as fast as static and 1.13 times as fast as LLEP-style (not executed), the fastest other",
        ),
    ],
)
def test_some_methods_alone(names, shown, finding):
    found = record(names)
    assert [method.name for method in compared(found.methods)] == shown
    text = simulation_finding(found)
    assert finding in text
    assert ("fastest other" in text) is ("ours" in names)
    assert simulation_table(found).column("Method")[:-2] == [method.label for method in found.methods]


@pytest.mark.usefixtures("unpainted")
def test_a_scenario_that_no_executor_carries_out_is_marked_at_every_figure(tmp_path):
    found = record(("static", "ours"))
    missing = ("expert-parallel ranks on several nodes", "expert data parallelism")
    assert executed(found) == "Executed in tests on CPU processes: static; foreroute. The two limits never are."
    found = replace(found, methods=tuple(replace(method, not_executed=missing) for method in found.methods))
    assert executed(found) == (
        f"Nothing of it has been executed as it is simulated: it takes {', '.join(missing)}. {SEVERAL_NODES}"
    )
    assert simulation_finding(found).startswith("By the cost model, and not executed, foreroute makes")
    assert set(simulation_table(found).column("Executed")) == {"no"}
    text = text_of(page(tmp_path, found))
    assert "All times are modelled, not executed" in text


def test_a_step_that_takes_longer_is_no_gain_however_fast_its_training():
    found = record(("static", "ours"))
    assert simulation_finding(found).startswith("By the cost model, foreroute makes recompute and update 1.34 times")
    phases = found["ours"].phases._replace(planning=9.0)
    hours = sum(phases) * 64 / 3600
    late = replace(found["ours"], phases=phases, gpu_hours=hours, gpu_hours_saved=found["static"].gpu_hours - hours)
    found = replace(found, methods=(found["static"], late))
    assert simulation_finding(found) == (
        "By the cost model, foreroute makes the whole step 0.80 times as fast as static, with 9\N{NO-BREAK SPACE}s "
        "more of planning; it makes recompute and update alone 1.34 times as fast as static."
    )
    assert simulation_tiles(found)[0].name == "GPU-hours lost in 1000 steps"
    assert simulation_tiles(found)[0].value == f"{1000 * (hours - found['static'].gpu_hours):.3g}"
