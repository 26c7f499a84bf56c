"""The tables of a run: its summary against numbers worked out by hand, and its alarms."""

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
from tests.report.report_runs import config, side, step_line, write_run


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
