"""A TRL user's script: three lines turn R3 on, and what it logs shows what that changes."""

import difflib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from foreroute.trainers.trl import trainer as adapter
from tests.trainers.trl.trl_runs import logged

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples" / "trl"
MISMATCH = ("k3", "f2", "disagreement", "disagreement_tokens")


def run(script, folder, monkeypatch):
    """The trainer of a script of examples/trl, once it has run."""
    monkeypatch.setattr(sys, "argv", [script, folder])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
    return runpy.run_path(str(EXAMPLES / script))["trainer"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The script with R3, and the same without replay: the same rollouts, for as long as the weights are the same."""
    trainers = {}
    for replay in ("R3", "none"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(adapter.RoutingReplay.__init__.__kwdefaults__, "replay", replay)
            trainers[replay] = run("grpo_r3.py", str(tmp_path_factory.mktemp(replay)), patch)
    return trainers


def test_three_lines_turn_replay_on():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("grpo.py", "grpo_r3.py"))
    changed = [line for line in difflib.ndiff(before[1:], after[1:]) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) == 3, changed


def test_trl_alone_runs_the_script_before(folder, monkeypatch):
    trainer = run("grpo.py", folder, monkeypatch)
    assert len(logged(trainer, "loss")) == trainer.args.max_steps
    assert not logged(trainer, "mismatch/k3")


@pytest.mark.exhaustive
def test_the_script_with_a_tool_calls_it_and_replays_every_turn(folder, monkeypatch):
    trainer = run("grpo_tools.py", folder, monkeypatch)
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}
    assert min(logged(trainer, "tools/call_frequency")) > 0


def test_mismatch_with_a_bfloat16_rollout_falls_and_routes_no_longer_differ(runs):
    with_replay, without = ({m: logged(runs[r], f"mismatch/{m}") for m in MISMATCH} for r in ("R3", "none"))
    assert set(with_replay["disagreement"]) == set(with_replay["disagreement_tokens"]) == {0.0}
    assert min(without["disagreement"]) > 0.005
    assert np.mean(with_replay["k3"]) < np.mean(without["k3"]) / 2
    assert np.mean(with_replay["f2"]) < np.mean(without["f2"]) / 2
    # the first rollout is the same in both runs, and so is everything that is not of the trainer's routes
    assert logged(runs["R3"], "reward")[0] == logged(runs["none"], "reward")[0]


def test_the_router_left_alone_drifts_from_the_rollout_within_a_step(runs):
    """Mini-batch by mini-batch; the second update of a rollout runs under weights that the first has changed."""
    drift = logged(runs["R3"], "mismatch/native_disagreement")
    assert drift[1] > drift[0] > 0
