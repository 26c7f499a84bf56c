"""The page of runs: what it says first, its tables by hand, and what is missing."""

import base64
import re
from typing import get_args

import pytest

from foreroute.mismatch import LooksLike
from foreroute.records import read_runs
from foreroute.records.step_record import ADVICE, AlarmName
from foreroute.report.run import run_finding, write_report
from foreroute.report.run_tables import alarm_table, load_table, means, phase_seconds, rewards
from tests.report.pages import plots_of, text_of
from tests.report.report_runs import config, execution, side, step_line, write_run


def run_of(tmp_path, lines):
    (run,) = read_runs([write_run(tmp_path / "run", config("r"), lines)])
    return run


MEASURES = ("k3", "f2", "differing_share", "differing_tokens_share")


def test_sides_are_averaged_over_the_steps_where_both_were_measured(tmp_path):
    lines = [
        {"step": 0, "mismatch": {"native": side(0.1, 0.2, 0.3, 0.4), "replayed": side(0.01, 0.02, 0.0, 0.0)}},
        {"step": 1, "mismatch": {"native": side(100.0, 1.0, 1.0, 1.0)}},
        {"step": 2, "mismatch": {"native": side(0.3, 0.4, 0.5, 0.6), "replayed": side(0.03, 0.0, 0.1, 0.2)}},
        {"step": 3, "mismatch": {"replayed": side(100.0, 1.0, 1.0, 1.0)}},
    ]
    run = run_of(tmp_path / "both", lines)
    assert run.num_paired == 2
    native, replayed = ([means(run, measure)[name] for measure in MEASURES] for name in ("native", "replayed"))
    assert native == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert replayed == pytest.approx([0.02, 0.01, 0.05, 0.1])
    run = run_of(tmp_path / "one", [{"step": i, "mismatch": {"native": side(0.1 * (i + 1))}} for i in range(3)])
    assert (means(run, "k3"), run.num_paired) == ({"native": pytest.approx(0.2), "replayed": None}, 0)
    run = run_of(tmp_path / "none", [{"step": 0}])
    assert all(means(run, measure) == {"native": None, "replayed": None} for measure in MEASURES)
    assert rewards(run) == (None, None)
    seconds = {"rollout": 3.0, "update": 1.0}, {"rollout": 1.0, "update": 0.5, "measure": 0.5}
    run = run_of(tmp_path / "seconds", [{"step": step, "seconds": each} for step, each in enumerate(seconds)])
    assert phase_seconds(run) == pytest.approx({"rollout": 2.0, "update": 0.75, "measure": 0.25})


def alarm(name, value, threshold=0.1):
    return {"name": name, "since": 0, "value": value, "threshold": threshold}


def run_with(folder, changes, **more):
    """Eight steps with these fields, in those steps."""
    lines = [step_line(step) | more | changes.get(step, {}) for step in range(8)]
    return write_run(folder, config(folder.name), lines)


def test_steps_in_a_row_are_one_row_with_the_worst_value(tmp_path):
    by_step = {
        2: [alarm("f2", 0.2)],
        3: [alarm("f2", 0.3), alarm("stale_routes", 0.5, 0.88)],
        4: [alarm("f2", 0.25)],
        6: [alarm("f2", 0.11)],
    }
    every = {step: [alarm(name, 0.5)] for step, name in enumerate(get_args(AlarmName))}
    table, of_every = (
        alarm_table(read_runs([run_with(tmp_path / name, {step: {"alarms": each} for step, each in alarms.items()})]))
        for name, alarms in (("run", by_step), ("every", every))
    )
    assert list(zip(table.column("Steps"), table.column("Worst value"), strict=True)) == [
        ("2 to 4", "0.3, limit 0.1"),
        ("6", "0.11, limit 0.1"),
        ("3", "0.5, limit 0.88"),
    ]
    assert table.column("What happened")[0].startswith("Too many tokens are far apart")
    assert table.column("Advice") == [ADVICE[name] for name in ("f2", "f2", "stale_routes")]
    assert of_every.column("Advice") == list(ADVICE.values())


def test_what_was_suspected_in_steps_in_a_row_is_one_row_with_the_first_of_them(tmp_path):
    frozen = {"looks_like": "frozen-rows", "sentence": "sequence 3 froze", "share": 0.8, "usual": 0.02}
    stale = frozen | {"looks_like": "stale-layer", "sentence": "decoder 3 is stale", "rank": 2}
    alarmed, native = {"alarms": [alarm("sentinel", 0.8)]}, {"native": side(2e-5, 0.0, 0.02, 0.1)}
    changes = {
        3: alarmed | {"suspicions": [frozen, stale, frozen | {"sentence": "sequence 5 froze", "sequence": 5}]},
        4: alarmed | {"suspicions": [frozen]},
        6: alarmed | {"suspicions": [frozen], "dropped_tokens": 40},
    }
    runs = read_runs([run_with(tmp_path / "run", changes, mismatch=native)])
    table = alarm_table(runs)
    columns = ("Steps", "What happened", "Worst value")
    assert [*zip(*map(table.column, columns), strict=True)] == [
        ("3 to 4", "frozen rows: sequence 3 froze; 1 more at once", "0.8, usual 0.02"),
        ("3", "stale layer: rank 2, decoder 3 is stale", "0.8, usual 0.02"),
        ("6", "frozen rows: sequence 3 froze; 40 response tokens were left out of the updates then", "0.8, usual 0.02"),
    ]
    assert table.column("Advice")[1] == LooksLike.STALE_LAYER.advice
    found = run_finding(runs)
    assert found.startswith("Replayed routes look wrong (frozen rows and stale layer) from step 3 on; ")
    assert "mismatch" not in found  # of wrong routes
    assert all(row.tone == "problem" for row in table.rows), "the alarm of the sentinel is no row beside them"
    sound = run_with(tmp_path / "sound", {}, mismatch=native)
    assert "mismatch" in run_finding(read_runs([tmp_path / "run", sound])), "of the other run"


STEPS = 20


def line(step, *, native=(0.02, 2e-3), replayed=(0.0, 1e-4), reward=0.5, **more):
    """A step whose two sides have this differing share and k3; a side that is None was not measured."""
    sides = {
        name: side(figures[1], cells=figures[0], tokens=3 * figures[0])
        for name, figures in (("native", native), ("replayed", replayed))
        if figures is not None
    }
    return {"step": step, "mismatch": sides, **({} if reward is None else {"reward_mean": reward}), **more}


def run(folder, routing="R3", steps=STEPS, **figures):
    return write_run(folder, config(folder.name, routing=routing), [line(step, **figures) for step in range(steps)])


def finding(*folders):
    return run_finding(read_runs(folders))


def test_replay_that_removes_what_differs(tmp_path):
    with_, without = run(tmp_path / "R3", replayed=(0.0, 1e-4)), run(tmp_path / "none", "none", native=(0.03, 1e-3))
    assert finding(with_).startswith("Replay removes every differing route and lowers k3 20 times; ")
    assert finding(without, with_) == (
        "Replay removes every differing route and lowers k3 10 to 20 times; the two rewards, 0.500 with replay, "
        "0.500 without, are not told apart."
    )


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"native": (0.0, 1e-4)}, "No route differs even without replay, so replay has none to mend; k3 is 1.00e-4"),
        ({"native": (0.0, 0.0), "replayed": (0.0, 0.0)}, "Trainer and rollout engine agree exactly: no route differs"),
        ({"replayed": (0.0, 2e-3)}, "Replay removes every differing route; k3 is 2.00e-3 with replay, 2.00e-3 without"),
        ({"replayed": (0.01, 1e-4)}, " of the routing decisions differ with replay, "),
        ({"native": None}, "The mismatch of trainer and rollout engine was not measured both with replay and without"),
    ],
)
def test_other_mismatches_are_told_as_they_are(tmp_path, figures, words):
    text = finding(run(tmp_path / "R3", **figures))
    assert words in text
    assert "lowers" not in text
    assert ("removes every" in text) is words.startswith("Replay removes")


@pytest.mark.parametrize(
    ("with_", "without", "words"),
    [
        ((0.9, 0.9), (0.1, 0.2), "the rewards of so few runs, 0.900 with replay, 0.100 to 0.200 without, are not told"),
        ((0.9, 0.8, 0.9), (0.1, 0.2, 0.1, 0.1), "the rewards of so few runs"),
        ((0.1, 0.2, 0.3, 0.4), (0.9, 0.8, 0.7, 0.6), "every run without replay ends with more reward than every other"),
        ((0.9, 0.8, 0.7, 0.3), (0.1, 0.2, 0.3, 0.4), "the rewards, 0.300 to 0.900 with replay, 0.100 to 0.400 without"),
        ((0.9, 0.8), (), "their mean reward over the last 10 steps is 0.800 to 0.900, by run"),
        ((None, None), (), "lowers k3 20 times."),
    ],
)
def test_rewards_are_told_apart_by_enough_runs_alone(tmp_path, with_, without, words):
    runs = [run(tmp_path / f"R3-{n}", reward=reward) for n, reward in enumerate(with_)]
    runs += [run(tmp_path / f"none-{n}", "none", reward=reward) for n, reward in enumerate(without)]
    text = finding(*runs)
    assert words in text
    assert ("told apart" in text) is ("few" in words or words.startswith("the rewards"))


def test_loads_of_ranks_and_runs_that_learned_nothing_come_first(tmp_path):
    spread = write_run(tmp_path / "a", config(), [line(step, execution=execution(step)) for step in range(3)])
    assert finding(spread).startswith("Plans lower the busiest rank from 1.")
    assert " to 1.00 times the mean; replay removes" in finding(spread)
    worse = execution(0) | {"max_over_mean": {"at_home": 1.2, "planned": 1.0, "executed": 1.3}}
    uneven = write_run(tmp_path / "b", config(), [line(0, execution=worse)])
    assert finding(uneven).startswith("The busiest rank has 1.30 times the mean, 1.20 with experts at home; ")
    idle, busy = (run(tmp_path / name, informative_share=share) for name, share in (("idle", 0.0), ("busy", 0.5)))
    nothing = "changed the weights, because all responses of every prompt got one reward; "
    assert finding(idle).startswith(f"No step {nothing}")
    assert finding(idle, busy).startswith(f"No step of idle {nothing}")
    assert "changed the weights" not in finding(busy)


TITLES = [
    "Mismatch of trainer and rollout engine (k3)",
    "Routing disagreement",
    "Tokens far apart, F(2)",
    "Routing disagreement by layer",
    "Top-k margins",
    "Reward",
    "Entropy",
    "Gradient norm",
    "Clipped tokens",
]


def page_of(folders, tmp_path):
    return write_report(read_runs(folders), tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_comparison_has_every_plot_names_every_run_and_marks_what_differs(tmp_path):
    ways = enumerate([("bfloat16", "none"), ("fp8", "R3")])
    runs = [
        write_run(
            tmp_path / f"{i}",
            config(f"run-{i}", seed=i, precision=precision, routing=routing),
            [step_line(s, seed=i, native=s % 2 == 0, total=6) for s in range(6)],
        )
        for i, (precision, routing) in ways
    ]
    page = page_of(runs, tmp_path)
    assert re.findall(r"<h3>(.*?)</h3>", page) == TITLES
    assert list(plots_of(page)) == TITLES
    assert all("run-0, run-1" in said for said in plots_of(page).values())
    for picture in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page):
        drawn = base64.b64decode(picture).decode()
        assert "<svg" in drawn
        assert all(link.startswith("#") for link in re.findall(r'(?:xlink:)?href="([^"]*)"', drawn))
    text = text_of(page)
    for said in (
        "Comparison of 2 runs",
        "No routing replay",
        "R3, rollout routing replay",
        "neither predicts the reward",
    ):
        assert said in text, said
    rows = re.findall(r'<tr class="( strong)?"><th scope="row">([\w.]+)</th>', page)
    assert ("", "model.experts") in rows
    assert [key for mark, key in rows if mark] == ["name", "seed", "rollout.precision", "rl.routing"]


@pytest.mark.usefixtures("unpainted")
def test_numbers_of_the_table_reach_the_page(tmp_path):
    native = side(0.00123, f2=0.025, cells=0.25, tokens=0.5)
    line = {"reward_mean": 0.25, "seconds": {"all": 1.5}, "mismatch": {"native": native}}
    lines = [{"step": i, **line} for i in range(20)]
    for both in lines[::5]:
        both["mismatch"] = {"native": native, "replayed": side(0.0)}
    html = page_of([write_run(tmp_path / "a", config("solo"), lines)], tmp_path)
    shown = re.findall(r'<tr class="( strong)?"><th scope="row"><span.*?</span>(solo</th>.*?)</tr>', html)
    cells = [[mark, *re.findall(r"<td[^>]*>(.*?)</td>", row.replace("\N{NO-BREAK SPACE}", " "))] for mark, row in shown]
    assert cells == [
        [" strong", "without", "25.0 %", "50.0 %", "1.23e-3", "2.50 %", "0.250", "0.250", "20", "1.50 s"],
        ["", "with", "0 %", "0 %", "0", "0 %", "", "", "", ""],
    ]
    assert "measured both ways at 4 of 20" in text_of(html)
    assert "Run solo" in text_of(html)


def test_a_run_with_nothing_optional_says_why_each_plot_is_absent(tmp_path):
    html = page_of([write_run(tmp_path / "a", config("bare"), [{"step": 0}])], tmp_path)
    text = text_of(html)
    assert "<figure" not in html
    assert text.count("is not shown. This was not recorded.") == len(TITLES) - 1  # nothing was clipped
    assert "bare: the mismatch of trainer and rollout engine was not recorded" in text


@pytest.mark.usefixtures("unpainted")
def test_expert_parallel_runs_show_the_load_of_their_ranks_and_what_plans_did_on_average(tmp_path):
    executions = [execution(step) for step in range(4)]
    lines = [step_line(step) | {"execution": each} for step, each in enumerate(executions)]
    spread = write_run(tmp_path / "spread", config("spread"), lines)
    alone = write_run(tmp_path / "alone", config("alone"), [step_line(0)])
    table = load_table(read_runs([alone, spread]))
    assert [column.heading for column in table.columns] == ["Mean of a step", "spread"]
    at_home = sum(each["max_over_mean"]["at_home"] for each in executions) / 4
    shown = {
        "Busiest rank over mean, experts at home": f"{at_home:.2f}",
        "Busiest rank over mean, as executed": "1.00",
        # 1,100 to 1,130 of 1,000
        "Experts at home over the bound of any packing, by length": "1.115",
        "Most memory of a rank in an update, modelled": "1.5 GB",
        # 3 MB by host memory, and 0 to 3 MB directly
        "Weights moved": "4.5 MB",
        "Waited for transfers": "0.50\N{NO-BREAK SPACE}s",
    }
    assert shown.items() <= dict(row.cells for row in table.rows).items()
    page = write_report(read_runs([alone, spread]), tmp_path / "report.html").read_text()
    assert "Load of every rank in every cell, step 3 of spread" in page


@pytest.mark.usefixtures("unpainted")
def test_what_is_odd_or_missing_is_said(tmp_path):
    """Of a killed run on two machines, which was measured one way, and of one that recorded less."""
    gpu = {"type": "cuda", "name": "NVIDIA <H100>", "peak_memory_bytes": 3_000_000_000}
    lines = [step_line(i, replayed=False) | {"device": gpu} for i in range(3)]
    lines[1]["grad_norm"], lines[2]["grad_norm"] = float("nan"), float("inf")
    sparse = [step_line(i) | {"execution": {"ranks": 2}} for i in range(3)]
    for line in sparse:
        del line["margins_LB"]
        line["mismatch"]["replayed"] |= {"k3": 0.0}
    killed = write_run(tmp_path / "a", config("two", routing="R2"), lines, tail='{"step": 3, ')
    page = page_of([killed, write_run(tmp_path / "b", config("sparse"), sparse)], tmp_path)
    assert "Load of every rank" not in page, "no loads were recorded of live routes"
    for said in (
        "two: at no step was the mismatch measured both without and with replay",
        "trainer's own recompute pass",
        "two: Line 4 of metrics.jsonl is half written",
        "NVIDIA <H100>, up to 3.00 GB",
        "so that zero can be shown",
        "Not drawn: 2 values that are infinite or not a number.",
        "Not recorded by: “sparse”.",
    ):
        assert said in text_of(page), said
