"""What someone who watches a run is shown, on a terminal and elsewhere."""

import io
import os
import re
import signal

import pytest
from rich.console import Console

from foreroute.cli import train
from foreroute.cli.train import watching
from foreroute.mismatch.alarm_rules import ADVICE
from foreroute.train import parse_config

CONFIG = parse_config({"name": "watched", "rl": {"steps": 41}}, source="test")
ALARM = {"kind": "f2", "since": 3, "value": 0.25, "threshold": 0.1}


def shown(monkeypatch, steps, *, terminal, width=160, mismatch=None):
    """Everything that is printed while steps end 2.5 s apart, the display being asked for its state each time."""
    now = iter(range(10**6))
    monkeypatch.setattr(train, "monotonic", lambda: 2.5 * next(now))
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, color_system=None)
    with watching(CONFIG, console) as watcher:
        watcher.on_warm_start(0, 1.5)
        for step in steps:
            alarms = [ALARM] if step in (5, 6, 7) else []
            watcher.on_step({"step": step, "reward_mean": 0.5, "mismatch": mismatch or {}, "alarms": alarms})
    return text.getvalue()


def test_elsewhere_a_line_now_and_then_says_the_pace_and_the_time_left(monkeypatch):
    lines = shown(monkeypatch, range(41), terminal=False).splitlines()
    assert lines == [
        "watched: warm start, step 0, loss 1.50",
        "watched: step 0, reward 0.50",
        "watched: alarm at step 5: too many tokens are far apart in trainer and engine, F(2) "
        f"(since step 3: 0.25, limit 0.1). {ADVICE['f2']}",
        "watched: step 20, reward 0.50, 2.5 s/step, 0:00:50 left",
        "watched: step 40, reward 0.50, 2.5 s/step",
    ]


def test_a_resumed_run_is_not_taken_for_a_fast_one(monkeypatch):
    lines = shown(monkeypatch, range(36, 41), terminal=False).splitlines()
    assert lines[-1] == "watched: step 40, reward 0.50, 2.5 s/step"


def test_a_terminal_has_a_bar_with_pace_and_time_left(monkeypatch):
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(monkeypatch, range(21), terminal=True))
    last = re.split(r"[\r\n]+", text.strip())[-1]
    assert re.search(r"watched: GRPO .* 21/41 reward 0\.50 .* s/step \d:\d\d:\d\d \d:\d\d:\d\d", last), last
    assert text.count("alarm at step 5") == 1


def test_a_narrow_terminal_cuts_nothing(monkeypatch):
    mismatch = {"native": {"k3": 3.1e-5}, "replayed": {"k3": 2.1e-5}}
    text = re.sub(
        r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(monkeypatch, range(21), terminal=True, width=80, mismatch=mismatch)
    )
    assert re.search(r"21/41 reward 0\.50, k3 .* s/step \d:\d\d:\d\d", text), text[-400:]
    assert "2.1e-05" in text
    assert "…" not in text


class Second(BaseException):
    """What whoever had the signals before makes of them."""


@pytest.fixture
def handlers():
    """Handlers of the signals that raise, and at the end those of the tests again."""

    def end(number, frame):
        raise Second

    before = {number: signal.signal(number, end) for number in train.ENDING}
    yield end
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "stopping; press Ctrl-C again to stop at once\n"),
        (signal.SIGTERM, "stopping; send SIGTERM again to stop at once\n"),
        (signal.SIGHUP, ""),  # nobody is there any more
    ],
)
def test_the_first_signal_asks_to_stop_and_the_second_is_not_kept(handlers, number, said):
    text = io.StringIO()
    with watching(CONFIG, Console(file=text)) as watcher:
        assert not watcher.should_stop()
        os.kill(os.getpid(), number)
        assert [watcher.should_stop(), watcher.should_stop()] == [True, True]
        assert text.getvalue() == said
        with pytest.raises(Second):
            os.kill(os.getpid(), signal.SIGTERM)
    assert {signal.getsignal(each) for each in train.ENDING} == {handlers}


def test_a_signal_that_is_ignored_stays_ignored(handlers):
    """As SIGHUP under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with watching(CONFIG, Console(file=io.StringIO())) as watcher:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not watcher.should_stop()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
