"""Where a run computes: the key, the devices of processes, and every tensor of a step on one device."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.errors import ConfigError
from foreroute.testing.counting_device import DEVICE, OnDevice, other_device
from foreroute.train.chain import ChainTask
from foreroute.train.loop import make_trainer
from foreroute.train.policy import make_engine, make_policy
from foreroute.train.prompts import make_task
from foreroute.train.ranks import find_device, num_started
from foreroute.train.warm_start import warm_start
from tests.train.small_runs import always_informative, small_config, tensors_of

FEW = {"prompts": 2, "group_size": 4, "precision": "float32"}
WARM = {"max_steps": 2, "batch_size": 8}


def seen(count, **environment):
    """As if torch saw so many CUDA devices, in a process with these variables."""
    stack = ExitStack()
    stack.enter_context(patch.object(torch.cuda, "is_available", lambda: count > 0))
    stack.enter_context(patch.object(torch.cuda, "device_count", lambda: count))
    stack.enter_context(patch.dict("os.environ", environment))
    return stack


def test_auto_takes_a_device_of_its_own_or_the_cpu():
    with seen(0):
        assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with seen(2):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:0")
        assert find_device("cpu") == torch.device("cpu")
    with seen(2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"):
        assert find_device("auto") == find_device("cuda") == torch.device("cuda:1")
    for rank in "0123":  # all processes of a machine decide alike
        with seen(2, LOCAL_RANK=rank, LOCAL_WORLD_SIZE="4"):
            assert find_device("auto") == torch.device("cpu")


def test_a_device_that_is_not_there_and_processes_that_are_no_number_are_refused():
    for count, variables, work in (
        (0, {}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, lambda: find_device("cuda")),
        (1, {"LOCAL_RANK": "x"}, lambda: find_device("auto")),
        *((0, {"WORLD_SIZE": said}, num_started) for said in ("0", "-1", "two", "\u0662")),
    ):
        with seen(count, **variables), pytest.raises(ConfigError):
            work()


def made(config, where):
    task = make_task(config)
    policy = make_policy(config, task, where)
    if config.warm_start.max_steps:
        warm_start(policy.model, config, task, lambda step, loss: None, lambda: False)
    return make_trainer(config, task, policy, make_engine(config, policy))


def stepped(config, where):
    trainer = made(config, where)
    with patch.object(ChainTask, "rewards", always_informative):
        experience, record = trainer.run_step()
    return experience, record, trainer.state()


@pytest.mark.slow
def test_a_step_mixes_no_devices_and_does_the_same_anywhere():
    config = small_config(warm_start=WARM, rollout=FEW)
    first_rollout, expected, state = stepped(config, torch.device("cpu"))
    with other_device(generators=DEVICE):
        second_rollout, record, state_there = stepped(config, DEVICE)
    assert np.array_equal(second_rollout.generation.trace.token_ids_N, first_rollout.generation.trace.token_ids_N)
    # AdamW steps by the learning rate, whatever the size of a gradient: one of roundings alone may go either way
    most = 2 * (WARM["max_steps"] * config.warm_start.learning_rate + config.rl.learning_rate)
    for there, here in zip(require_there(record, state_there), tensors_of(state["model"]), strict=True):
        torch.testing.assert_close(there.values_here, here, rtol=0, atol=most)
    assert record.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def require_there(record, state):
    """Weights and optimizer state are on the device. Returns the weights."""
    assert record.device.kind == DEVICE.type
    weights = tensors_of(state["model"])
    assert all(isinstance(weight, OnDevice) for weight in weights)
    optimizer = [tensor for tensor in tensors_of(state["optimizer"]) if tensor.dim()]
    assert len(optimizer) >= 2 * (len(weights) - 2)
    assert all(isinstance(tensor, OnDevice) for tensor in optimizer)
    return weights
