"""Alarms over hand-made series, with the step at which each goes off, and series at which none does."""

import json
import math
import re
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreroute.mismatch import Alarm, AlarmRules, Kind, Signals, alarms

RULES = AlarmRules()


def first_alarm(rules=RULES, **series):
    """The first step with alarms, and these, for series of equal length by name."""
    history = []
    for step, values in enumerate(zip(*series.values(), strict=True)):
        history.append(Signals(step=step, **dict(zip(series, values, strict=True))))
        if found := alarms(history, rules):
            return step, found
    return None


def test_collapse_is_a_mean_below_half_its_maximum_for_ten_steps():
    """Five zeros in ten take the mean to half of what it was, and the sixth, of step 35, below it."""
    rewards = [0.75] * 30 + [0.0] * 30
    step, [alarm] = first_alarm(reward=rewards)
    means = {end: fmean(rewards[end - 9 : end + 1]) for end in range(9, 60)}
    assert next(end for end in means if means[end] < 0.375) == 35
    assert step == 35 + 9
    # the first mean below the limit is of the rewards of steps 26 to 35
    assert alarm == Alarm(kind="collapse", since=26, value=0.0, threshold=0.375)


@pytest.mark.parametrize(
    "rewards",
    [
        [0.75] * 30 + [0.375] * 30,  # half is not below half
        [0.75] * 30 + [0.0] * 10 + [0.75] * 20,  # low for nine means only
        [0.0] * 60,
        [-1.0] * 30 + [-3.0] * 30,  # no half of what is below zero
        [0.1 + 0.01 * step for step in range(60)],
        [0.8] * 9 + [0.0] * 9,  # no ten steps in a mean, then no ten means
    ],
)
def test_what_is_no_collapse(rewards):
    assert first_alarm(reward=rewards) is None


@given(
    st.lists(st.integers(-4, 16), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.25, 0.5, 0.75]),
)
def test_the_collapse_rule_is_its_definition(sixteenths, window, patience, share):
    """Against the definition written out in loops, on rewards whose sums are exact."""
    rewards = [value / 16 for value in sixteenths]
    rules = AlarmRules(window=window, collapse_for=patience, collapse_below=share)
    low, largest, expected = 0, -math.inf, None
    for end in range(window - 1, len(rewards)):
        mean = sum(rewards[end - window + 1 : end + 1]) / window
        largest = max(largest, mean)
        low = low + 1 if largest > 0 and mean < share * largest else 0
        if low >= patience and expected is None:
            expected = (end, end - low + 1 - window + 1)
    seen = first_alarm(rules, reward=rewards)
    assert (None if seen is None else (seen[0], seen[1][0].since)) == expected


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_collapse_at_once(loss):
    step, [alarm] = first_alarm(loss=[0.1, loss], reward=[0.5, 0.5])
    assert (step, alarm.kind, alarm.since) == (1, "collapse", 1)


@pytest.mark.parametrize(
    ("signal", "kind", "good", "bad", "steps_until"),
    [
        ("f2", "f2", 0.01, 0.2, 4),
        ("live_agreement", "stale_routes", 1.0, 0.5, 2),
        ("effective_share", "effective_share", 0.9, 0.2, 5),
        ("disagreement", "disagreement", 0.08, 0.4, 2),
    ],
)
def test_early_warnings(signal, kind, good, bad, steps_until):
    values = [good] * 20 + [bad] * 10
    limit = {"f2": 0.1, "stale_routes": 0.88, "effective_share": 0.5, "disagreement": 2 * 0.08}[kind]
    passed = [end for end in range(9, 30) if (fmean(values[end - 9 : end + 1]) - limit) * (bad - good) > 1e-9]
    assert passed[0] == 20 + steps_until
    step, [alarm] = first_alarm(**{signal: values})
    assert (step, alarm.kind, alarm.since) == (passed[0], kind, passed[0] - 9)
    assert alarm.threshold == pytest.approx(limit)
    assert alarm.value == pytest.approx(fmean(values[step - 9 : step + 1]))
    assert first_alarm(**{signal: [good] * 40}) is None
    assert first_alarm(**{signal: [bad] * 9}) is None


def test_disagreement_that_doubles_far_below_what_healthy_models_show_is_no_alarm():
    assert first_alarm(disagreement=[0.01] * 10 + [0.09] * 30) is None
    assert first_alarm(disagreement=[0.15] * 10 + [0.25] * 30) is None
    assert first_alarm(disagreement=[0.01] * 10 + [0.11] * 30) is not None


def test_what_is_measured_now_and_then_is_averaged_over_measurements():
    """F(2) every fifth step: the tenth measurement is of step 45, and the alarm stays on until the next one."""
    values = [0.2 if step % 5 == 0 else None for step in range(50)]
    step, [alarm] = first_alarm(f2=values)
    assert (step, alarm.since) == (45, 0)
    assert alarms([Signals(step=s, f2=v) for s, v in enumerate(values)], RULES) == [alarm]


def test_signals_are_those_of_a_record():
    record = {
        "step": 3,
        "reward_mean": 0.5,
        "loss": -0.1,
        "trained_with": "replayed",
        "mismatch": {"native": {"f2": 0.3, "differing_share": 0.2}, "replayed": {"f2": 0.01, "differing_share": 0.0}},
        "live_agreement": [0.9, 0.7],
        "importance": {"effective_share": 0.8},
    }
    assert Signals.of(json.loads(json.dumps(record))) == Signals(
        step=3, reward=0.5, loss=-0.1, f2=0.01, disagreement=0.2, live_agreement=0.7, effective_share=0.8
    )
    assert Signals.of({"step": 0}) == Signals(step=0)
    assert Signals.of({"step": 0, "importance": {"effective_share": 0.0}}) == Signals(step=0)


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_weights_without_a_finite_effective_share_leave_none(share):
    records = [{"step": step, "importance": {"effective_share": share}} for step in range(10)]
    [alarm] = alarms([Signals.of(record) for record in records], RULES)
    assert (alarm.kind, alarm.since, alarm.value) == ("effective_share", 0, 0.0)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_alarm_says_what_to_do_here_and_in_the_docs(kind):
    advice = Alarm(kind=kind, since=0, value=0.2, threshold=0.1).advice
    assert advice.endswith(".")
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    (said,) = re.findall(rf"^\| `{kind}` \| ([^|]*) \|$", page, re.MULTILINE)
    assert said.replace("`", "") == advice
