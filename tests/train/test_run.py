"""Whole runs: what they record, that they repeat and resume bit for bit, and what they refuse."""

import copy
import math
import shutil

import numpy as np
import pytest
import torch

from foreroute.errors import DivergedError, RunFolderError, StaleTraceError
from foreroute.records import StepRecord
from foreroute.testing.models import FAMILIES
from foreroute.train import RunFolder, parse_config, train
from foreroute.train.chain import ChainTask
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import make_schedule
from foreroute.train.policy import Alone, make_policy
from foreroute.train.prompts import make_task
from foreroute.train.run import Watcher
from tests.tiers import grid
from tests.train.small_runs import records, same_state, small_config, small_values, trainer_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that others are compared with, and its checkpoint. Tests leave its folder as it is."""
    return train(small_config(rl={"steps": 2}), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def copied(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "copied")
    return RunFolder(tmp_path / "copied")


@grid(("routing", "mini_steps", "precision"), [("R3", 3, "fp8"), ("R2", 2, "bfloat16")], quick=1, day=1)
def test_an_interrupted_run_ends_as_the_uninterrupted_one(tmp_path, routing, mini_steps, precision):
    config = small_config(
        rl={"routing": routing, "mini_steps": mini_steps, "steps": 3}, rollout={"precision": precision}
    )
    whole = train(config, tmp_path / "whole")
    seen, phases = [], []
    stop_after = Watcher(
        on_step=seen.append, should_stop=lambda: len(seen) == 1, on_phase=lambda *phase: phases.append(phase)
    )
    stopped = train(config, tmp_path / "stopped", watcher=stop_after)
    assert load_checkpoint(stopped.last_checkpoint())["step"] == 1
    assert phases == [(0, name) for name in ("rollout", "recompute", "measure", "update")]
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert records(resumed.path) == records(whole.path)
    assert same_state(load_checkpoint(resumed.last_checkpoint()), load_checkpoint(whole.last_checkpoint()))


def test_routes_of_another_step_are_refused(tmp_path):
    trainer = trainer_of(small_config())
    experience, _ = trainer.run_step()
    recompute, mini_batches = make_schedule(experience, trainer.config.rl, Alone(), seed=(0, 0))
    old = trainer.recompute(experience.generation, recompute, "native").logprobs_R
    trainer.run_step()
    with pytest.raises(StaleTraceError):
        trainer.recompute(experience.generation, recompute, "replayed")
    with pytest.raises(StaleTraceError):
        trainer.update(experience, mini_batches, old, experience.generation.trace)


def test_nothing_random_is_left_in_training():
    """Dropout and noise of routers: two passes on other random numbers are one, and that of an engine."""
    sizes = {name: size for name, size in FAMILIES["mixtral"].items() if name != "vocab_size"}
    noise = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1, "attention_dropout": 0.3}
    values = {**small_values(), "model": {"family": "phimoe", "sizes": sizes | noise}}
    config = parse_config(values, source="test")
    model = make_policy(config, make_task(config)).model
    ids = torch.arange(1, 11)[None]
    outputs = [model(input_ids=ids).logits for _ in range(2)]
    assert model.training
    assert torch.equal(*outputs)
    assert torch.equal(outputs[0], model.eval()(input_ids=ids).logits)


NORM = "model.norm.weight"
MISFITS = {
    "another model": lambda model, moments: model.update({NORM: torch.zeros(3)}),
    "moments of another weight": lambda model, moments: moments[0].update(exp_avg=torch.zeros(3)),
    "steps below one": lambda model, moments: moments[0].update(step=torch.tensor(-1.0)),
    # AdamW would begin its moments anew, and the run end with other bits
    "no moments after steps": lambda model, moments: moments.clear(),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_on_resume(copied, name):
    state = load_checkpoint(copied.last_checkpoint())
    MISFITS[name](state["model"], state["optimizer"]["state"])
    copied.save_checkpoint(state, data="", keep=9)
    with pytest.raises(RunFolderError):
        train(small_config(rl={"steps": 3}), copied.path, resume=True)


def test_a_run_whose_last_update_leaves_no_numbers_ends_with_an_error(copied):
    """Its loss and gradient were finite, and no later step would look: a second moment below 0 has no root."""
    state = load_checkpoint(copied.last_checkpoint())
    state["optimizer"]["state"][0]["exp_avg_sq"] -= 1.0
    copied.save_checkpoint(state, data="", keep=9)
    kept = {path: path.read_bytes() for path in (copied.path / "model").iterdir()}
    with pytest.raises(DivergedError, match=r"embed_tokens.weight.* step 2"):
        train(small_config(rl={"steps": 3}), copied.path, resume=True)
    assert copied.last_checkpoint().name == "step-000002.safetensors"
    assert {path: path.read_bytes() for path in (copied.path / "model").iterdir()} == kept


def test_a_metric_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    """No line with NaN is written, which JSON does not know and an alarm would not see."""
    monkeypatch.setattr(ChainTask, "rewards", lambda task, problems, responses: np.full(len(responses), np.nan))
    with pytest.raises(DivergedError, match=r"reward_mean, reward_std .*0"):
        train(small_config(warm_start={"max_steps": 1}), tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert run.records() == []
    for wrong in (math.inf, math.nan):
        with pytest.raises(DivergedError, match=r"live_agreement.*step 0"):
            run.append(StepRecord(step=0, live_agreement=[0.5, wrong]))
    assert run.records() == []
    run.append(StepRecord(step=0, live_agreement=[0.5, 1.0]))  # the control
    assert len(run.records()) == 1


@pytest.mark.usefixtures("rewards_that_differ")
def test_a_gradient_that_is_no_number_changes_no_weight():
    trainer = trainer_of(small_config())
    trainer.run_step()
    before = copy.deepcopy(trainer.state())
    trainer.policy.router_parameters()[0].register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError):
        trainer.run_step()
    kept = trainer.state()
    assert same_state([before["model"], before["optimizer"]], [kept["model"], kept["optimizer"]])


def test_a_step_without_any_reward_to_learn_from_is_taken_without_an_update(monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", lambda task, problems, responses: np.ones(len(responses)))
    trainer = trainer_of(small_config())
    before = copy.deepcopy(trainer.state()["model"])
    _, record = trainer.run_step()
    assert same_state(before, trainer.state()["model"])
    assert (record.reward_mean, record.grad_norm, record.loss) == (1, 0, 0)
    assert record.informative_share == 0
    assert trainer.step == 1
