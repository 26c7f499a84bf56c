"""The page of a simulation: its numbers are those of the records, and it says what is missing."""

import re
from dataclasses import replace

import pytest

from foreroute.plan.capabilities import SEVERAL_NODES
from foreroute.report.simulation import (
    HEADINGS,
    executed,
    simulation_finding,
    simulation_table,
    simulation_tiles,
    write_simulation_page,
)
from foreroute.simulate import simulate
from foreroute.simulate.engine import PARTS
from foreroute.simulate.records import compared
from tests.report.pages import plots_of, rows_of, text_of
from tests.simulate.simulate_cases import small_config

CONFIG = small_config(gpus=8, groups=2, methods=["eplb_step", "foreroute", "foreroute_rehomed"], planning_s=0.25)
SHOWN = {
    "Executed": lambda m, _: "no" if m.not_executed else "yes",
    "Recompute and update, modelled": lambda m, _: 1e3 * m.training_s,
    "Speedup over static": lambda m, static: static.training_s / m.training_s,
    "Share of forced balance": lambda m, _: 100 * m.share_of_forced_balance,
    "Share of the bound": lambda m, _: 100 * m.share_of_bound,
    "Slowest rank over mean": lambda m, _: m.imbalance,
    "Wait for the plan": lambda m, _: 1e3 * m.phases.planning,
    "Home moves": lambda m, _: 1e6 * m.phases.home_moves,
    "Exposed transfers": lambda m, _: 100 * m.exposed_share,
    "Experts fetched per cell": lambda m, _: m.fetches_per_cell,
    "Planning time": lambda m, _: 1e3 * m.planning_s,
    "GPU-hours saved": lambda m, static: 100 * (static.gpu_hours - m.gpu_hours) / static.gpu_hours,
}


@pytest.fixture(scope="module")
def found():
    return simulate(CONFIG)


def part_of(found, *names, **seconds):
    """Some methods of a record alone, in these seconds of recompute and update, and none of planning."""
    methods = []
    for name in names:
        parts = [dict.fromkeys(PARTS, 0.0) | {"experts": share * seconds.get(name, 1.0)} for share in (0.2, 0.8)]
        phases = found[name].phases._replace(planning=0.0, home_moves=0.0)
        phases = phases._replace(recompute=parts[0]["experts"], update=parts[1]["experts"])
        methods.append(replace(found[name], phases=phases, recompute_parts=parts[0], update_parts=parts[1]))
    return replace(found, methods=tuple(methods), forced_balance_s=1.5)


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


def test_numbers_sentences_and_pictures_are_those_of_the_records(found, tmp_path):
    full = write_simulation_page(found, CONFIG, tmp_path / "page.html").read_text()
    for method in found.methods:
        cells = cells_of(full, method.label)
        known = {name: of(method, found["static"]) for name, of in SHOWN.items()}
        if method.name == "static":
            del known["Wait for the plan"], known["Planning time"], known["GPU-hours saved"]
        if not method.phases.home_moves:
            del known["Home moves"]
        assert set(cells) == set(known)
        assert [name for name, text in cells.items() if not rounds_to(text, known[name])] == []
    for limit, seconds in (("forced balance", found.forced_balance_s), ("lower bound", found.bound_s)):
        cells = cells_of(full, limit)
        assert cells["Executed"] == "no"
        assert rounds_to(cells["Speedup over static"], found["static"].training_s / seconds)
    text = text_of(full)
    hours = found["static"].gpu_hours - found["foreroute"].gpu_hours
    assert simulation_tiles(found)[0].value == f"{abs(1000 * hours):.3g}"
    for said in (simulation_finding(found), executed(found), *(tile.value for tile in simulation_tiles(found))):
        assert said.replace("\N{NO-BREAK SPACE}", " ") in text
    step = plots_of(full)["The step by method"]
    assert re.match(r"static [\d.]+ m?s, EPLB, this step \(not executed\) [\d.]+ m?s, foreroute ", step)


def test_some_methods_alone(found):
    alone = part_of(found, "static", static=2.0)
    assert "forced balance would make recompute and update 1.33 times as fast" in simulation_finding(alone)
    others = part_of(found, "static", "eplb_step", static=2.0, eplb_step=1.6)
    said = "EPLB, this step (not executed) makes recompute and update 1.25 times"
    assert said in simulation_finding(others)
    both = part_of(found, "static", "foreroute", "eplb_step", static=2.0, foreroute=1.25, eplb_step=1.6)
    said = "1.60 times as fast as static and 1.28 times as fast as EPLB, this step (not executed), the fastest other"
    assert said in simulation_finding(both)
    assert [method.name for method in compared(both.methods)] == ["foreroute", "eplb_step"]
    assert simulation_table(both).column("Method")[:-2] == [method.label for method in both.methods]


@pytest.mark.usefixtures("unpainted")
def test_a_scenario_that_no_executor_carries_out_is_marked_at_every_figure(found, tmp_path):
    some, missing = part_of(found, "static", "foreroute"), ("expert-parallel ranks on several nodes",)
    assert executed(some) == "Executed in tests on CPU processes: static; foreroute. The two limits never are."
    some = replace(some, methods=tuple(replace(method, not_executed=missing) for method in some.methods))
    assert executed(some).startswith("Nothing of it has been executed as it is simulated: it takes expert-parallel")
    assert executed(some).endswith(SEVERAL_NODES)
    assert simulation_finding(some).startswith("By the cost model, and not executed, foreroute makes")
    assert set(simulation_table(some).column("Executed")) == {"no"}
    text = text_of(write_simulation_page(some, CONFIG, tmp_path / "page.html").read_text())
    assert "All times are modelled, not executed" in text


def test_a_step_that_takes_longer_is_no_gain_however_fast_its_training(found):
    some = part_of(found, "static", "foreroute", static=2.0, foreroute=1.25)
    assert simulation_finding(some).startswith("By the cost model, foreroute makes recompute and update 1.60 times")
    late = replace(some["foreroute"], phases=some["foreroute"].phases._replace(planning=9.0))
    some = replace(some, methods=(some["static"], late))
    gain = f"{sum(some['static'].phases) / sum(late.phases):.2f}"
    assert simulation_finding(some) == (
        f"By the cost model, foreroute makes the whole step {gain} times as fast as static, with 9\N{NO-BREAK SPACE}s "
        "more of planning; it makes recompute and update alone 1.60 times as fast as static."
    )
    slower = replace(late, phases=late.phases._replace(planning=0.6))
    both = part_of(found, "static", "eplb_step", static=2.0, eplb_step=1.6).methods
    assert simulation_finding(replace(some, methods=(*both, slower))).endswith(
        "; whole steps, with the wait for plans and moves of homes, are shortest with EPLB, this step (not executed)."
    )
    lossy = replace(late, gpu_hours=1.0, gpu_hours_saved=-0.25)
    lost = simulation_tiles(replace(some, methods=(some["static"], lossy)))[0]
    assert (lost.name, lost.value) == ("GPU-hours lost in 1000 steps", "250")
