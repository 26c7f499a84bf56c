"""Run folders: what is read, forgiven and refused; alarms over hand-made series, and when each goes off."""

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreroute.errors import RunFolderError
from foreroute.records import Alarm, StepRecord, alarms
from foreroute.records.runs import parse_step, read_run
from foreroute.records.step_record import ImportanceRecord, MismatchRecord
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


@pytest.mark.parametrize("tail", [b'{"step": 2, "reward_mean": 0.5', b'{"step": 2, "\xc3'])
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
        ('{"step": 1, "margins_LB": [[1, 2]]}', r"margins_LB.*36 counts"),
        (execution_line([[[1, 2]]], [[[3]]]), r"same numbers.*layers"),
        (execution_line([[[1, 2, 3]]], [[[3, 2, 1]]]), "loads of 2 ranks"),
        ('{"step": 1, "of_tomorrow": 1}', "of_tomorrow: unknown key"),
        ('{"step": true}', "step: .*integer .*True"),
        (f'{{"step": 1, "loss": -{10**400}}}', r"loss: .*64 bits"),
        ('{"step": 1, "live_agreement": [1.0, null]}', r"live_agreement\.1: .*number .*None"),
        ('{"step": 1, "trained_with": "sideways"}', r"trained_with: .*'native'.*'replayed'"),
        ('{"step": 1, "device": {"type": "\\ud800", "name": ""}}', r"device\.type: text.*half"),
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
        with pytest.raises(RunFolderError, match=rf"{name} .*not exist"):
            read_run(folder)


def test_what_a_trainer_writes_is_read_whole():
    """A key that is not in the schema would be refused."""
    _, record = trainer_of(small_config()).run_step()
    line = json.dumps(record.to_json()).encode()
    assert parse_step(line) == record
    assert {"mismatch", "importance", "informative_share", "device", "margins_LB"} <= json.loads(line).keys()


def record(step, *, reward=None, loss=None, f2=None, disagreement=None, live_agreement=None, effective_share=None):
    """A step of a run without replay that measured these figures."""
    f2, disagreement = (math.nan if value is None else value for value in (f2, disagreement))
    shares = [] if effective_share is None else [ImportanceRecord(effective_share=effective_share, cut_share=0.0)]
    side = MismatchRecord(k3=0.0, f2=f2, differing_share=disagreement, differing_tokens_share=0.0)
    return StepRecord(
        step=step,
        reward_mean=reward,
        loss=loss,
        trained_with="native",
        mismatch={"native": side},
        live_agreement=None if live_agreement is None else [live_agreement],
        importance=next(iter(shares), None),
    )


def first_alarm(**series):
    """The first step with alarms, and these, for series of equal length by name."""
    history = []
    for step, values in enumerate(zip(*series.values(), strict=True)):
        history.append(record(step, **dict(zip(series, values, strict=True))))
        if found := alarms(history):
            return step, found
    return None


@given(st.lists(st.tuples(st.integers(-4, 16), st.integers(1, 25)), min_size=1, max_size=6))
@example([(12, 30), (0, 30)])
@example([(12, 30), (6, 30)])  # half is not below half
@example([(12, 30), (0, 10), (12, 20)])  # low for nine means only
@example([(-16, 30), (-48, 30)])  # no half of what is below zero
@example([(13, 9), (0, 9)])  # no ten steps in a mean, then no ten means
def test_the_collapse_rule_is_its_definition(stretches):
    """Against the definition written out in loops, on rewards in sixteenths, whose sums are exact."""
    rewards = [value / 16 for value, steps in stretches for _ in range(steps)]
    low, largest, expected = 0, -math.inf, None
    for end in range(9, len(rewards)):
        mean = sum(rewards[end - 9 : end + 1]) / 10
        largest = max(largest, mean)
        low = low + 1 if largest > 0 and mean < 0.5 * largest else 0
        if low >= 10 and expected is None:
            alarm = Alarm(name="collapse", since=end - low + 1 - 9, value=mean, threshold=0.5 * largest)
            expected = (end, [alarm])
    assert first_alarm(reward=rewards) == expected


@pytest.mark.parametrize(("lost", "at"), [(math.nan, 0), (-math.inf, 29)])
def test_a_step_without_a_reward_silences_no_collapse(lost, at):
    """No response of a step got a reward: that step is left out of the means, and all after it are as they were."""
    rewards = [0.75] * 30 + [0.0] * 30
    step, [alarm] = first_alarm(reward=[*rewards[:at], lost, *rewards[at:]])
    whole, [expected] = first_alarm(reward=rewards)
    assert (step, alarm.since) == (whole + 1, expected.since + (at <= expected.since))
    assert (alarm.value, alarm.threshold) == (expected.value, expected.threshold)


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_loss_that_is_not_finite_is_a_collapse_at_once(loss):
    step, [alarm] = first_alarm(loss=[0.1, loss], reward=[0.5, 0.5])
    assert (step, alarm.name, alarm.since) == (1, "collapse", 1)


@pytest.mark.parametrize(
    ("signal", "name", "good", "bad", "steps_until"),
    [
        ("f2", "f2", 0.01, 0.2, 4),
        ("live_agreement", "stale_routes", 1.0, 0.5, 2),
        ("effective_share", "effective_share", 0.9, 0.2, 5),
        ("disagreement", "disagreement", 0.08, 0.4, 2),
    ],
)
def test_early_warnings(signal, name, good, bad, steps_until):
    values = [good] * 20 + [bad] * 10
    limit = {"f2": 0.1, "stale_routes": 0.88, "effective_share": 0.5, "disagreement": 2 * 0.08}[name]
    passed = [end for end in range(9, 30) if (fmean(values[end - 9 : end + 1]) - limit) * (bad - good) > 1e-9]
    assert passed[0] == 20 + steps_until
    step, [alarm] = first_alarm(**{signal: values})
    assert (step, alarm.name, alarm.since) == (passed[0], name, passed[0] - 9)
    assert alarm.threshold == pytest.approx(limit)
    assert alarm.value == pytest.approx(fmean(values[step - 9 : step + 1]))
    assert first_alarm(**{signal: [good] * 40}) is None
    assert first_alarm(**{signal: [bad] * 9}) is None
    assert first_alarm(disagreement=[0.01] * 10 + [0.09] * 30) is None, "far below what healthy models show"


def test_what_is_measured_now_and_then_is_averaged_over_measurements():
    """F(2) every fifth step: the tenth measurement is of step 45, and the alarm stays on until the next one."""
    values = [0.2 if step % 5 == 0 else None for step in range(50)]
    step, [alarm] = first_alarm(f2=values)
    assert (step, alarm.since) == (45, 0)
    assert alarms([record(s, f2=v) for s, v in enumerate(values)]) == [alarm]


def test_figures_are_those_of_the_routes_that_a_step_trained_with():
    """F(2) judges the side that trains, and disagreement always the trainer's own routes."""
    close = MismatchRecord(k3=0.0, f2=0.01, differing_share=0.0, differing_tokens_share=0.0)

    [alarm] = alarms([StepRecord(step=n, live_agreement=[1.0, 0.5]) for n in range(10)])
    assert alarm.value == 0.5, "of several mini-batches the last"
    for trained_with in ("native", "replayed", None):
        history = [record(step, f2=0.3, disagreement=0.05 if step < 10 else 0.4) for step in range(30)]
        history = [
            step.model_copy(update={"trained_with": trained_with, "mismatch": step.mismatch | {"replayed": close}})
            for step in history
        ]
        expected = {"f2", "disagreement"} if trained_with == "native" else {"disagreement"}
        assert {alarm.name for alarm in alarms(history)} == expected


@pytest.mark.parametrize(("share", "seen"), [(math.nan, 0.0), (0.0, None)])
def test_weights_without_a_finite_effective_share_leave_no_sample_and_no_tokens_none(share, seen):
    found = alarms([record(step, effective_share=share) for step in range(10)])
    assert [alarm.value for alarm in found] == ([] if seen is None else [seen])
