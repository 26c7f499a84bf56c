"""What a page of runs says first, true of the figures and no more, and its tables, by hand."""

from typing import get_args

import pytest

from foreroute.mismatch import LooksLike
from foreroute.records import read_runs
from foreroute.records.step_record import ADVICE, AlarmKind
from foreroute.report.run import run_finding
from foreroute.report.run_tables import (
    alarm_table,
    means,
    phase_seconds,
    rewards,
)
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
    run = run_of(tmp_path, lines)
    assert run.num_paired == 2
    native, replayed = ([means(run, measure)[name] for measure in MEASURES] for name in ("native", "replayed"))
    assert native == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert replayed == pytest.approx([0.02, 0.01, 0.05, 0.1])


def test_a_run_measured_one_way_shows_that_way_alone_and_an_empty_step_nothing(tmp_path):
    run = run_of(tmp_path / "a", [{"step": i, "mismatch": {"native": side(0.1 * (i + 1))}} for i in range(3)])
    assert (means(run, "k3"), run.num_paired) == ({"native": pytest.approx(0.2), "replayed": None}, 0)
    run = run_of(tmp_path / "b", [{"step": 0}])
    assert all(means(run, measure) == {"native": None, "replayed": None} for measure in MEASURES)
    assert rewards(run) == (None, None)
    seconds = {"rollout": 3.0, "update": 1.0}, {"rollout": 1.0, "update": 0.5, "measure": 0.5}
    run = run_of(tmp_path / "c", [{"step": step, "seconds": each} for step, each in enumerate(seconds)])
    assert phase_seconds(run) == pytest.approx({"rollout": 2.0, "update": 0.75, "measure": 0.25})


def alarm(kind, value, threshold=0.1):
    return {"kind": kind, "since": 0, "value": value, "threshold": threshold}


def run_with(folder, by_step, steps=8, **more):
    lines = [step_line(step) | {"alarms": by_step.get(step, []), **more} for step in range(steps)]
    return write_run(folder, config(folder.name), lines)


def test_steps_in_a_row_are_one_row_with_the_worst_value(tmp_path):
    by_step = {
        2: [alarm("f2", 0.2)],
        3: [alarm("f2", 0.3), alarm("stale_routes", 0.5, 0.88)],
        4: [alarm("f2", 0.25)],
        6: [alarm("f2", 0.11)],
    }
    table = alarm_table(read_runs([run_with(tmp_path / "run", by_step)]))
    assert list(zip(table.column("Steps"), table.column("Worst value"), strict=True)) == [
        ("2 to 4", "0.3, limit 0.1"),
        ("6", "0.11, limit 0.1"),
        ("3", "0.5, limit 0.88"),
    ]
    assert table.column("What happened")[0].startswith("Too many tokens are far apart")
    assert table.column("Advice") == [ADVICE[kind] for kind in ("f2", "f2", "stale_routes")]
    every = {step: [alarm(kind, 0.5)] for step, kind in enumerate(get_args(AlarmKind))}
    assert alarm_table(read_runs([run_with(tmp_path / "every", every)])).column("Advice") == list(ADVICE.values())


def suspicion(looks_like, sentence="sequence 3 froze", **more):
    return {"looks_like": looks_like, "sentence": sentence, "share": 0.8, "usual": 0.02, **more}


def suspicious_run(folder, by_step, *, dropped=None, steps=8):
    lines = [
        step_line(step)
        | {"suspicions": by_step.get(step, []), "alarms": [alarm("sentinel", 0.8)] if step in by_step else []}
        | {"dropped_tokens": (dropped or {}).get(step, 0)}
        | {"mismatch": {"native": side(2e-5, 0.0, 0.02, 0.1)}}
        for step in range(steps)
    ]
    return write_run(folder, config(folder.name), lines)


LEFT_OUT = "were left out of the updates then"


def test_what_was_suspected_in_steps_in_a_row_is_one_row_with_the_first_of_them(tmp_path):
    frozen, stale = suspicion("frozen-rows"), suspicion("stale-layer", "decoder 3 is stale", rank=2)
    by_step = {3: [frozen, stale, frozen | {"sentence": "sequence 5 froze", "sequence": 5}], 4: [frozen], 6: [frozen]}
    runs = read_runs([suspicious_run(tmp_path / "run", by_step, dropped={6: 40})])
    table = alarm_table(runs)
    columns = ("Steps", "What happened", "Worst value")
    assert [*zip(*map(table.column, columns), strict=True)] == [
        ("3 to 4", "frozen rows: sequence 3 froze; 1 more at once", "0.8, usual 0.02"),
        ("3", "stale layer: rank 2, decoder 3 is stale", "0.8, usual 0.02"),
        ("6", f"frozen rows: sequence 3 froze; 40 response tokens {LEFT_OUT}", "0.8, usual 0.02"),
    ]
    assert table.column("Advice")[1] == LooksLike.STALE_LAYER.advice
    found = run_finding(runs)
    assert found.startswith("Replayed routes look wrong (frozen rows and stale layer) from step 3 on; ")
    assert "mismatch" not in found  # of wrong routes
    assert all(row.tone == "problem" for row in table.rows), "the alarm of the sentinel is no row beside them"
    sound = suspicious_run(tmp_path / "sound", {})
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


def several(tmp_path, with_, without):
    runs = [run(tmp_path / f"R3-{n}", reward=reward) for n, reward in enumerate(with_)]
    return [*runs, *(run(tmp_path / f"none-{n}", "none", reward=reward) for n, reward in enumerate(without))]


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
    text = finding(*several(tmp_path, with_, without))
    assert words in text
    assert ("told apart" in text) is ("few" in words or words.startswith("the rewards"))


def test_loads_of_ranks_come_first(tmp_path):
    spread = write_run(tmp_path / "a", config(), [line(step, execution=execution(step)) for step in range(3)])
    assert finding(spread).startswith("Plans lower the busiest rank from 1.")
    assert " to 1.00 times the mean; replay removes" in finding(spread)
    worse = execution(0) | {"max_over_mean": {"at_home": 1.2, "planned": 1.0, "executed": 1.3}}
    uneven = write_run(tmp_path / "b", config(), [line(0, execution=worse)])
    assert finding(uneven).startswith("The busiest rank has 1.30 times the mean, 1.20 with experts at home; ")


def test_runs_that_learned_nothing_say_so_first(tmp_path):
    def sampled(share):
        return {"informative_share": share}

    idle, busy = run(tmp_path / "idle", **sampled(0.0)), run(tmp_path / "busy", **sampled(0.5))
    nothing = "changed the weights, because all responses of every prompt got one reward; "
    assert finding(idle).startswith(f"No step {nothing}")
    assert finding(idle, busy).startswith(f"No step of idle {nothing}")
    assert "changed the weights" not in finding(busy)
