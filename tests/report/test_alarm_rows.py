"""The alarms of a run as the report tells them."""

import html
import json
from typing import get_args

import pytest

from foreroute.errors import RunFolderError
from foreroute.mismatch import Kind
from foreroute.mismatch.alarms import ADVICE
from foreroute.report import read_runs, write_report
from foreroute.report.alarm_rows import alarm_rows
from report_runs import config, step_line, write_run


def alarm(kind, value, threshold=0.1):
    return {"kind": kind, "since": 0, "value": value, "threshold": threshold}


def run_with(folder, by_step, steps=8, **more):
    lines = [step_line(step) | {"alarms": by_step.get(step, []), **more} for step in range(steps)]
    return write_run(folder, config(folder.name), lines)


def text_of(folders, target):
    return write_report(folders, target).read_text()


def test_steps_in_a_row_are_one_row_with_the_worst_value(tmp_path):
    by_step = {
        2: [alarm("f2", 0.2)],
        3: [alarm("f2", 0.3), alarm("stale_routes", 0.5, 0.88)],
        4: [alarm("f2", 0.25)],
        6: [alarm("f2", 0.11)],
    }
    rows = alarm_rows(read_runs([run_with(tmp_path / "run", by_step)]))
    assert [(row.steps, row.figures) for row in rows] == [
        ("2 to 4", "0.3, limit 0.1"),
        ("6", "0.11, limit 0.1"),
        ("3", "0.5, limit 0.88"),
    ]
    assert rows[0].what.startswith("Too many tokens are far apart")
    assert [row.advice for row in rows] == [ADVICE[kind] for kind in ("f2", "f2", "stale_routes")]


def test_the_page_says_what_to_do_about_every_alarm(tmp_path):
    by_step = {step: [alarm(kind, 0.5)] for step, kind in enumerate(get_args(Kind))}
    page = " ".join(html.unescape(text_of([run_with(tmp_path / "run", by_step)], tmp_path / "page.html")).split())
    for kind in get_args(Kind):
        assert ADVICE[kind] in page, kind


def test_rollbacks_are_told_and_a_damaged_file_is_named(tmp_path):
    folder = run_with(tmp_path / "run", {})
    back = {"number": 1, "at_step": 7, "to_step": 4, "because": "reward has collapsed", "skipped_steps": 4}
    (folder / "rollbacks.json").write_text(json.dumps({"settled": True, "rollbacks": [back]}))
    page = text_of([folder], tmp_path / "page.html")
    assert "Rolled back to step 4" in page
    assert "Reward has collapsed." in page
    (folder / "rollbacks.json").write_text('{"rollbacks": 3}')
    with pytest.raises(RunFolderError, match=r"rollbacks\.json is damaged"):
        read_runs([folder])


def test_the_page_says_where_nothing_was_recorded_and_where_nothing_went_off(tmp_path):
    quiet = run_with(tmp_path / "quiet", {}, live_agreement=[1.0, 0.9])
    old = write_run(tmp_path / "old", config("old"), [step_line(step) for step in range(8)])
    assert "<h2>Alarms" not in text_of([old], tmp_path / "1.html")
    page = text_of([quiet], tmp_path / "2.html")
    assert "No alarm was on." in page
    assert "Live routes" in page
    assert "No alarm was on in quiet; the other runs did not record it." in text_of([quiet, old], tmp_path / "3.html")
