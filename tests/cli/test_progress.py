"""What someone who watches a run is shown, on a terminal and elsewhere."""

import io
import os
import re
import signal
import threading

import pytest

from foreroute.cli import terminal
from foreroute.cli.exit_codes import ENDING, run
from foreroute.cli.terminal import Console
from foreroute.cli.train import watching
from foreroute.errors import ForerouteError
from foreroute.mismatch.alarm_rules import ADVICE
from foreroute.train import parse_config

CONFIG = parse_config({"name": "watched", "rl": {"steps": 41}}, source="test")
ALARM = {"kind": "f2", "since": 3, "value": 0.25, "threshold": 0.1}


def shown(monkeypatch, steps, *, is_terminal=False, mismatch=None):
    """Everything that is printed while steps end 2.5 s apart, and what the heartbeat would say after each call."""
    now, text, said = [0.0], io.StringIO(), []
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    console = Console(file=text, force_terminal=is_terminal, width=80, color_system=None)

    def heard():
        said.append(str(terminal._under_way[-1]))

    with watching(CONFIG, console) as watcher:
        heard()
        watcher.on_warm_start(0, 1.5)
        heard()
        for step in steps:
            watcher.on_phase(step, "rollout")
            heard()
            now[0] += 2.5
            alarms = [ALARM] if step in (5, 6, 7) else []
            watcher.on_step({"step": step, "reward_mean": 0.5, "mismatch": mismatch or {}, "alarms": alarms})
        heard()
    return text.getvalue(), said


def test_elsewhere_a_line_now_and_then_says_the_time_left(monkeypatch):
    lines = shown(monkeypatch, range(41))[0].splitlines()
    assert lines == [
        "watched: warm start, step 0, loss 1.50",
        "watched: step 0, reward 0.50, 0:01:40 left",
        "watched: alarm at step 5: too many tokens are far apart in trainer and engine, F(2) "
        f"(since step 3: 0.25, limit 0.1). {ADVICE['f2']}",
        "watched: step 20, reward 0.50, 0:00:50 left",
        "watched: step 40, reward 0.50",
    ]


def test_a_resumed_run_is_not_taken_for_a_fast_one(monkeypatch):
    printed, said = shown(monkeypatch, range(36, 39))
    assert printed.splitlines() == ["watched: warm start, step 0, loss 1.50"]
    assert said[-1] == "watched, GRPO: saving what is due, reward 0.50, 39 of 41 steps, 8 s, 0:00:05 left"


def test_the_heartbeat_knows_the_step_and_its_phase(monkeypatch):
    _, said = shown(monkeypatch, range(2))
    assert said == [
        "watched, preparing the run, 0 s",
        "watched, warm start: loss 1.50, until 0.3, 1 of 800 steps at most, 0 s",
        "watched, GRPO: rollout, 0 of 41 steps, 0 s",
        "watched, GRPO: rollout, reward 0.50, 1 of 41 steps, 2 s, 0:01:40 left",
        "watched, GRPO: saving what is due, reward 0.50, 2 of 41 steps, 5 s, 0:01:38 left",
    ]


def test_a_narrow_terminal_has_a_bar_and_cuts_nothing(monkeypatch):
    mismatch = {"native": {"k3": 3.1e-5}, "replayed": {"k3": 2.1e-5}}
    text, _ = shown(monkeypatch, range(21), is_terminal=True, mismatch=mismatch)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    words = re.sub(r"[\s━╸╺]+", " ", text)
    assert "reward 0.50, k3 without replay 3.1e-05, k3 with 2.1e-05, 21 of 41 steps, 52 s, 0:00:50 left" in words
    assert "━" in text
    assert "…" not in text
    assert text.count("alarm at step 5") == 1


@pytest.fixture
def ended(monkeypatch):
    """Runs something as a verb, with handlers of signals; its exit code, and those of the tests again."""
    # workers of pytest have a thread of their own, and a verb that leaves threads behind ends its process at once
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def run_it(verb):
        with pytest.raises(SystemExit) as end:
            run(verb)
        return end.value.code

    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield run_it
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
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_command(ended, number, said):
    text, seen = io.StringIO(), []

    def verb():
        with watching(CONFIG, Console(file=text)) as watcher:
            seen.append(watcher.should_stop())
            os.kill(os.getpid(), number)
            seen.extend([watcher.should_stop(), watcher.should_stop()])
            if again:
                os.kill(os.getpid(), signal.SIGTERM)
        seen.append(watcher.should_stop())

    again = False
    assert ended(verb) == 0
    assert (seen, text.getvalue()) == ([False, True, True, True], said)
    again = True
    assert ended(verb) == 128 + signal.SIGTERM
    assert {signal.getsignal(each) for each in ENDING} == {signal.SIG_DFL}


def test_an_error_after_the_first_signal_is_told(ended, capsys):
    def verb():
        with watching(CONFIG, Console(file=io.StringIO())):
            os.kill(os.getpid(), signal.SIGTERM)
            raise ForerouteError("the disk is full")

    assert ended(verb) == 1
    assert capsys.readouterr().err == "error: the disk is full\n"
