"""Real runs whose rewards collapse on some data, or whose numbers stop being finite, and what alarms do about it."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import load_generation
from foreroute.errors import CollapseError, ConfigError
from foreroute.train import RunFolder, Watcher, load_checkpoint, loop, train
from foreroute.train.alarm_actions import read_rollbacks
from foreroute.train.rollout import roll_out
from tests.train.counting_runs import counting, counting_config
from tests.train.small_runs import records, same_state, small_config, trainer_of

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
    monkeypatch.setattr(loop, "roll_out", poisoned)


def alarmed(**alarms):
    """Means of two steps, low twice: with the poison of steps 5, 6 and 7 the alarm goes off at step 7."""
    return small_config(
        rl={"steps": 9, "routing": "none", "learning_rate": 3e-3},
        task={"min_operands": 2, "max_operands": 2},
        measure={"compare_every": 100},
        rollout={"prompts": 4, "group_size": 2},
        warm_start={"max_steps": 1},
        alarms={"window": 2, "collapse_for": 2, **alarms},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alarms")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "roll_out", poisoned)
        told = []
        back = train(alarmed(action="rollback"), folder / "back", watcher=Watcher(on_rollback=told.append))
        warned = train(alarmed(), folder / "warned")
    return warned, back, told


def test_warn_says_so_and_goes_on(runs):
    warned, _, _ = runs
    kinds = [[alarm["kind"] for alarm in record["alarms"]] for record in records(warned.path)]
    assert kinds == [[]] * 7 + [["collapse"]] + [[]]
    [alarm] = records(warned.path)[7]["alarms"]
    assert (alarm["since"], alarm["value"]) == (5, 0)
    rewards = [record["reward_mean"] for record in records(warned.path)]
    assert alarm["threshold"] == pytest.approx(max(map(sum, pairwise(rewards))) / 4)
    assert not (warned.path / "rollbacks.json").exists()


@pytest.mark.usefixtures("_poisoned")
def test_stop_ends_the_run_with_one_error_and_it_can_be_taken_up_again(tmp_path, runs):
    with pytest.raises(CollapseError, match=r"step 7: reward has collapsed.*since step 5.*step-000006\.safetensors"):
        train(alarmed(action="stop"), tmp_path / "run")
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(8))
    resumed = train(alarmed(action="warn"), tmp_path / "run", resume=True)
    assert records(resumed.path) == records(runs[0].path)


def test_rollback_goes_back_to_before_the_trouble_and_on_with_replay_and_other_data(runs):
    warned, back, told = runs
    [rollback] = read_rollbacks(back)
    assert told == [rollback]
    # the alarm rests on step 5 and later: the checkpoint of step 6 is no good one, and that of step 4 is
    assert (rollback.at_step, rollback.to_step, rollback.skipped_steps) == (7, 4, 4)
    new = records(back.path)
    assert new[:4] == records(warned.path)[:4]
    assert [record["step"] for record in new] == list(range(9))
    assert [record["trained_with"] for record in new] == ["native"] * 4 + ["replayed"] * 5
    assert [record.get("rollbacks") for record in new] == [None] * 4 + [1] * 5
    assert all(record["alarms"] == [] for record in new)
    aside = back.path / "rolled-back-1"
    assert records(aside) == records(warned.path)[4:8]
    assert [path.name for path in (aside / "checkpoints").iterdir()] == ["step-000006.safetensors"]
    assert {path.name for path in (aside / "traces").iterdir()} == {
        "step-000004.safetensors",
        "step-000006.safetensors",
    }


def test_after_a_rollback_a_run_is_one_with_replay_from_that_checkpoint_on_later_data(runs, monkeypatch):
    _, back, _ = runs
    monkeypatch.setattr(loop, "roll_out", poisoned)
    config = alarmed(action="rollback")
    trainer = trainer_of(config.model_copy(update={"rl": config.rl.model_copy(update={"routing": "R3"})}))
    trainer.restore(load_checkpoint(back.path / "checkpoints" / "step-000004.safetensors"))
    trainer.skipped_steps = 4
    experiences = [trainer.run_step()[0] for _ in range(5)]
    assert same_state(load_checkpoint(back.last_checkpoint()), {"step": 9, **trainer.state()})
    # the problems of step 8, which the policy had not seen
    expected = roll_out(trainer.engine, trainer.task, config, 8, trainer.execution.ranks).generation
    got = experiences[0].generation
    assert np.array_equal(got.prompt_lengths, expected.prompt_lengths)
    for s in range(len(got)):
        length = int(got.prompt_lengths[s])
        assert np.array_equal(got.trace.tokens(s)[:length], expected.trace.tokens(s)[:length])
    kept = fr.load(back.path / "traces" / "step-000004.safetensors")
    assert kept.equals(got.trace)
    rollout = load_generation(back.path / "rollouts" / "step-000004.safetensors")
    assert np.array_equal(rollout.logprobs_R, got.logprobs_R)


@pytest.mark.usefixtures("_poisoned")
def test_a_run_that_is_resumed_after_a_rollback_ends_with_the_same_bits(tmp_path, runs):
    _, back, _ = runs
    seen = []
    # steps 0 to 7, then 4 and 5 again
    watcher = Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 10)
    train(alarmed(action="rollback"), tmp_path / "run", watcher=watcher)
    assert [record["step"] for record in seen] == [*range(8), 4, 5]
    resumed = train(alarmed(action="rollback"), tmp_path / "run", resume=True)
    assert records(resumed.path) == records(back.path)
    assert same_state(load_checkpoint(resumed.last_checkpoint()), load_checkpoint(back.last_checkpoint()))
    assert read_rollbacks(resumed) == read_rollbacks(back)


def test_a_run_goes_back_only_so_often(tmp_path):
    told, config = [], counting_config(alarms={"action": "rollback", "max_rollbacks": 1})
    with counting(range(5, 40)), pytest.raises(CollapseError, match="rolled back once already"):
        train(config, tmp_path / "run", watcher=Watcher(on_rollback=told.append))
    assert [(each.at_step, each.to_step) for each in told] == [(7, 4)]
    assert read_rollbacks(RunFolder(tmp_path / "run")) == told
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000004.safetensors")["step"] == 4


def test_a_checkpoint_of_the_step_that_trouble_began_with_is_no_good_one(tmp_path):
    told, config = [], counting_config(alarms={"action": "rollback"}, checkpoint={"every": 5})
    with counting(POISON):
        train(config, tmp_path / "run", watcher=Watcher(on_rollback=told.append))
    assert [(each.at_step, each.to_step) for each in told] == [(7, 0)]


def test_a_run_that_diverges_goes_back_too(tmp_path):
    config = small_config(
        rl={"learning_rate": 1e30, "warmup_steps": 0},
        rollout={"prompts": 4, "group_size": 2},
        warm_start={"max_steps": 1},
        alarms={"action": "rollback", "max_rollbacks": 1},
    )
    told = []
    with pytest.raises(CollapseError, match=r"logits are not finite.*rolled back once already"):
        train(config, tmp_path / "run", watcher=Watcher(on_rollback=told.append))
    assert [(each.to_step, each.because.count("not finite")) for each in told] == [(0, 1)]
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000000.safetensors")["step"] == 0


def test_an_action_without_alarms_is_refused():
    with pytest.raises(ConfigError, match="an empty act_on never acts"):
        small_config(alarms={"action": "stop", "act_on": []})
    with pytest.raises(ConfigError, match=r"alarms\.act_on"):
        small_config(alarms={"act_on": ["reward"]})


def test_a_damaged_list_of_rollbacks_is_named(tmp_path):
    (tmp_path / "rollbacks.json").write_text(json.dumps({"rollbacks": [{"number": 1}], "settled": True}))
    with pytest.raises(fr.errors.RunFolderError, match=r"rollbacks\.json is damaged"):
        read_rollbacks(RunFolder(tmp_path))
