"""What a page of runs states first: true of the figures, and no more than they show."""

import pytest

from foreroute.records import read_runs
from foreroute.report.run import run_finding
from tests.report.report_runs import config, execution, side, write_run

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
