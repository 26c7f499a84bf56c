"""What someone who watches a command is shown, on a terminal and elsewhere."""

import io
import os
import signal
import threading

import pytest

from foreroute.cli.exit_codes import ENDING, run
from foreroute.cli.terminal import Console
from foreroute.cli.train import watching
from foreroute.records import Alarm, StepRecord
from foreroute.records.step_record import ADVICE
from foreroute.train import parse_config

CONFIG = parse_config({"name": "watched", "rl": {"steps": 41}}, source="test")
ALARM = Alarm(name="f2", since=3, value=0.25, threshold=0.1)


def shown(steps):
    """Everything that is printed while steps end 2.5 s apart."""
    now, text = [0.0], io.StringIO()
    console = Console(file=text, force_terminal=False, width=80, color_system=None, get_time=lambda: now[0])
    with watching(CONFIG, console) as watcher:
        watcher.on_warm_start(0, 1.5)
        for step in steps:
            watcher.on_phase(step, "rollout")
            now[0] += 2.5
            alarms = [ALARM] if step in (5, 6, 7) else []
            watcher.on_step(StepRecord(step=step, reward_mean=0.5, alarms=alarms))
    return text.getvalue()


def test_elsewhere_a_line_now_and_then_says_the_time_left():
    assert shown(range(41)).splitlines() == [
        "watched: warm start, step 0, loss 1.50",
        "watched: step 0, reward 0.50",
        "watched: alarm at step 5: too many tokens are far apart in trainer and engine, F(2) "
        f"(since step 3: 0.25, limit 0.1). {ADVICE['f2']}",
        "watched: step 20, reward 0.50, 0:00:50 left",
        "watched: step 40, reward 0.50",
    ]


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
