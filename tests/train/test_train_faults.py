"""What goes wrong in a run: one error or a documented skip for each fault, and no checkpoint is lost.

Other faults of docs/train.md have their tests with the engines, the checkpoints and the command line.
"""

import copy
import resource
from contextlib import contextmanager

import numpy as np
import pytest

from foreroute.errors import DivergedError, RunFolderError
from foreroute.train import RunFolder, train
from foreroute.train.chain import ChainTask
from foreroute.train.folder import load_checkpoint
from tests.train.counting_runs import counting, counting_config
from tests.train.small_runs import always_informative, records, same_state, small_config, trainer_of


def config_of(**rl):
    return small_config(
        rl={"steps": 4, **rl},
        task={"min_operands": 2, "max_operands": 2},
        rollout={"prompts": 4, "group_size": 2},
        warm_start={"max_steps": 1},
        measure={"compare_every": 100},
    )


@pytest.fixture(scope="module", autouse=True)
def _something_to_learn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainTask, "rewards", always_informative)
        yield


def test_a_gradient_that_is_no_number_changes_no_weight():
    trainer = trainer_of(config_of())
    trainer.run_step()
    before = {name: tensor.clone() for name, tensor in trainer.policy.model.state_dict().items()}
    moments = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    trainer.policy.router_parameters()[0].register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(DivergedError):
        trainer.run_step()
    assert same_state(before, dict(trainer.policy.model.state_dict()))
    assert same_state(moments, trainer.optimizer.state_dict()["state"])


@pytest.mark.parametrize("worth", [0.0, 1.0])
def test_a_step_without_any_reward_to_learn_from_is_taken_without_an_update(monkeypatch, worth):
    monkeypatch.setattr(ChainTask, "rewards", lambda task, problems, responses: np.full(len(responses), worth))
    trainer = trainer_of(config_of())
    before = {name: tensor.clone() for name, tensor in trainer.policy.model.state_dict().items()}
    _, record = trainer.run_step()
    assert same_state(before, dict(trainer.policy.model.state_dict()))
    assert (record.reward_mean, record.grad_norm, record.loss) == (worth, 0, 0)
    assert record.sampling.informative_share == 0
    assert trainer.step == 1


@contextmanager
def room_for(num_bytes):
    """No file may grow beyond this size, as on a full disk: what fits is written, and the rest is not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("method", "at_call", "num_bytes", "named", "resumes_at"),
    [
        # checkpoints before steps 0, 2 and 4; traces and metrics of steps 0, 2 and of 0, 1, 2
        ("save_checkpoint", 2, 300, r"step-000004\.safetensors", 2),
        ("save_rollout", 1, 100, r"step-000002\.safetensors", 2),
        ("append", 2, 150, r"metrics\.jsonl", 2),
    ],
)
def test_a_full_disk_is_one_error_and_what_was_written_is_whole(
    tmp_path, monkeypatch, method, at_call, num_bytes, named, resumes_at
):
    config, write, calls = counting_config(), getattr(RunFolder, method), []

    def on_a_full_disk(run, *given, **options):
        calls.append(1)
        if len(calls) <= at_call:
            return write(run, *given, **options)
        with room_for(num_bytes):
            return write(run, *given, **options)

    with counting():
        expected = train(config, tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, method, on_a_full_disk)
            with pytest.raises(RunFolderError, match=f"{named}.*--resume"):
                train(config, tmp_path / "run")
        assert load_checkpoint(RunFolder(tmp_path / "run").last_checkpoint())["step"] == resumes_at
        resumed = train(config, tmp_path / "run", resume=True)
    assert records(resumed.path) == records(expected.path)
    assert same_state(load_checkpoint(resumed.last_checkpoint()), load_checkpoint(expected.last_checkpoint()))
