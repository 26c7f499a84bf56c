"""Run folders: what is read, what is forgiven, and what is refused with the place and the remedy."""

import json
from dataclasses import replace

import pytest

from foreroute.errors import RunFolderError
from foreroute.records.runs import parse_step, read_run
from tests.report.report_runs import config, step_line, write_run
from tests.train.small_runs import small_config, trainer_of


def steps(count, **changes):
    return [step_line(i, **changes) for i in range(count)]


def test_a_folder_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path / "a", config("mine", routing="R3"), steps(3)))
    assert (run.name, run.routing, run.trains_with) == ("mine", "R3", "replayed")
    assert replace(run, routing="R2").trains_with == "native", "R2 replays no routes of the engine"
    assert [step.step for step in run.steps] == [0, 1, 2]
    assert run.steps[1].mismatch["native"].k3 == step_line(1)["mismatch"]["native"]["k3"]
    assert run.config["model"]["experts"] == 64
    assert run.notes == ()


TORN = [b'{"step": 2, "reward_mean": 0.5', b'{"step": 2, "\xc3']


@pytest.mark.parametrize("tail", TORN)
def test_a_torn_last_line_is_dropped_and_noted(tmp_path, tail):
    folder = write_run(tmp_path / "a", config(), steps(2))
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(tail)
    run = read_run(folder)
    assert (len(run.steps), len(run.notes)) == (2, 1)
    assert "Line 3" in run.notes[0]
    whole = read_run(write_run(tmp_path / "b", config(), steps(2), tail=json.dumps(step_line(2))))
    assert (len(whole.steps), whole.notes) == (3, ()), "without a newline behind it"


def edit_line(folder, number, text):
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def execution_line(at_home, executed):
    passes = {"update": {"at_home_MLG": at_home, "executed_MLG": executed}}
    said = dict.fromkeys(("at_home", "executed"), 1.5)
    return json.dumps({"step": 1, "execution": {"ranks": 2, "max_over_mean": said, "passes": passes}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"step": 1, "rew', "JSON"),
        ('{"step": 1, "clip_share": -0.1}', "clip_share: .*expected a number from 0 to 1"),
        ('{"step": 1, "exact_share": 1.1}', "exact_share: .*expected a number from 0 to 1"),
        ('{"step": 1, "mismatch": {"native": {"k3": 0.1}}}', r"mismatch\.native\.f2: required"),
        ('{"step": 1, "margins_LB": [[1, 2]]}', "margins_LB needs 36 counts in every layer"),
        (execution_line([[[1, 2]]], [[[3]]]), "the same numbers of micro-steps and layers"),
        (execution_line([[[1, 2, 3]]], [[[3, 2, 1]]]), "loads of 2 ranks"),
        ('{"step": 1, "of_tomorrow": 1}', "of_tomorrow: unknown key"),
        ('{"step": true}', "step: .*integer .*True"),
        (f'{{"step": 1, "loss": -{10**400}}}', "loss: an integer of more than 64 bits"),
        ('{"step": 1, "live_agreement": [1.0, null]}', r"live_agreement\.1: .*number .*None"),
        ('{"step": 1, "trained_with": "sideways"}', "trained_with: .*'native' or 'replayed'"),
        ('{"step": 1, "device": {"kind": "\\ud800", "name": ""}}', r"device\.kind: text with .*half"),
    ],
)
def test_a_damaged_line_in_the_middle_is_refused_with_its_place(tmp_path, text, reason):
    folder = write_run(tmp_path / "a", config(), steps(4))
    edit_line(folder, 2, text)
    with pytest.raises(RunFolderError, match=rf"metrics.jsonl, line 2 (.|\n)*{reason}"):
        read_run(folder)


OTHER_MODEL = step_line(2)
OTHER_MODEL["mismatch"]["native"]["differing_share_by_layer"] = {f"mtp {n}": 0.1 for n in range(8)}


@pytest.mark.parametrize("lines", [[*steps(2), step_line(1)], [step_line(1)], [*steps(2), OTHER_MODEL], []])
def test_lines_that_are_not_those_of_the_steps_from_0_on_are_refused(tmp_path, lines):
    with pytest.raises(RunFolderError):
        read_run(write_run(tmp_path / "a", config(), lines))


def test_what_is_missing_or_damaged_beside_the_metrics_is_named(tmp_path):
    with pytest.raises(RunFolderError, match="is not a folder"):
        read_run(tmp_path / "a")
    folder = write_run(tmp_path / "a", config() | {"name": 7.0}, steps(1))
    with pytest.raises(RunFolderError, match=r"config\.json .*name.* 7\.0"):
        read_run(folder)
    for name in ("metrics.jsonl", "config.json"):
        (folder / name).unlink()
        with pytest.raises(RunFolderError, match=f"{name} does not exist"):
            read_run(folder)


def test_what_a_trainer_writes_is_read_whole():
    """A key that is not in the schema would be refused."""
    _, record = trainer_of(small_config()).run_step()
    line = json.dumps(record.to_json()).encode()
    assert parse_step(line) == record
    assert {"mismatch", "importance", "informative_share", "device", "margins_LB"} <= json.loads(line).keys()
