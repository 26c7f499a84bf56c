"""Real runs whose rewards collapse on some data, and what alarms do about it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from foreroute.errors import CollapseError, ConfigError
from foreroute.train import RunFolder, load_checkpoint, loop, train
from foreroute.train.rollout import roll_out
from tests.train.counting_runs import counting, counting_config, short_means
from tests.train.small_runs import records, small_config

POISON = (5, 6, 7)


def poisoned(engine, task, config, step, ranks):
    """Whatever is answered to the problems of these steps is worth nothing; elsewhere it is worth about a half."""
    experience = roll_out(engine, task, config, step, ranks)
    size = len(experience.rewards_S)
    rewards_S = np.zeros(size) if step in POISON else np.random.default_rng(step).uniform(0.4, 0.6, size)
    return replace(
        experience,
        rewards_S=rewards_S,
        advantages_S=rewards_S - rewards_S.mean(),
        informative_S=np.full(size, step not in POISON),
        sampled=replace(experience.sampled, first_rewards_S=rewards_S),
    )


@pytest.fixture
def _poisoned(monkeypatch):
    short_means(monkeypatch)
    monkeypatch.setattr(loop, "roll_out", poisoned)


def alarmed(**alarms):
    return small_config(
        rl={"steps": 9, "routing": "none", "learning_rate": 3e-3},
        task={"min_operands": 2, "max_operands": 2},
        measure={"compare_every": 100},
        rollout={"prompts": 4, "group_size": 2},
        warm_start={"max_steps": 1},
        alarms=alarms,
    )


@pytest.fixture(scope="module")
def warned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        short_means(patch)
        patch.setattr(loop, "roll_out", poisoned)
        return train(alarmed(), tmp_path_factory.mktemp("alarms") / "warned")


def test_warn_says_so_and_goes_on(warned):
    kinds = [[alarm["kind"] for alarm in record["alarms"]] for record in records(warned.path)]
    assert kinds == [[]] * 7 + [["collapse"]] + [[]]
    [alarm] = records(warned.path)[7]["alarms"]
    assert (alarm["since"], alarm["value"]) == (5, 0)
    rewards = [record["reward_mean"] for record in records(warned.path)]
    assert alarm["threshold"] == pytest.approx(max(map(sum, pairwise(rewards))) / 4)


@pytest.mark.usefixtures("_poisoned")
def test_stop_ends_the_run_with_one_error_and_it_can_be_taken_up_again(tmp_path, warned):
    with pytest.raises(CollapseError, match=r"step 7: reward has collapsed.*since step 5.*step-000006\.safetensors"):
        train(alarmed(action="stop"), tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(8))
    resumed = train(alarmed(action="warn"), tmp_path / "run", resume=True)
    assert records(resumed.path) == records(warned.path)


def test_a_run_that_was_stopped_is_stopped_again_when_it_is_resumed_as_it_was(tmp_path):
    config = counting_config(alarms={"action": "stop"})
    with counting(POISON):
        for resume in (False, True):
            with pytest.raises(CollapseError, match="step 7: reward has collapsed"):
                train(config, tmp_path / "run", resume=resume)
    assert load_checkpoint(RunFolder(tmp_path / "run").last_checkpoint())["step"] == 6


def test_an_action_without_alarms_is_refused():
    with pytest.raises(ConfigError, match="an empty act_on never acts"):
        small_config(alarms={"action": "stop", "act_on": []})
    with pytest.raises(ConfigError, match=r"alarms\.act_on"):
        small_config(alarms={"act_on": ["reward"]})
