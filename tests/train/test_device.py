"""Every tensor of a step on one device, which does there what it does on the CPU."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.testing.counting_device import DEVICE, MixedDevicesError, OnDevice, other_device
from foreroute.train.chain import ChainTask
from foreroute.train.warm_start import warm_start
from tests.train.small_runs import random_rewards, small_config, tensors_of, trainer_of

FEW = {"prompts": 2, "group_size": 4, "precision": "float32"}
WARM = {"max_steps": 2, "batch_size": 8}


def stepped(config, where):
    quiet = (lambda step, loss: None), (lambda: False)
    trainer = trainer_of(config, where, lambda model, task: warm_start(model, config, task, *quiet))
    with patch.object(ChainTask, "rewards", random_rewards()):
        experience, record = trainer.run_step()
    return experience, record, trainer.state()


@pytest.mark.slow
def test_a_step_mixes_no_devices_and_does_the_same_anywhere():
    rl, model = {"method": "gspo", "correction": {"method": "tis"}}, {"gradient_checkpointing": True}
    config = small_config(warm_start=WARM, rollout=FEW, rl=rl, model=model)
    first_rollout, expected, state = stepped(config, torch.device("cpu"))
    with other_device(generators=DEVICE):
        second_rollout, record, state_there = stepped(config, DEVICE)
    assert np.array_equal(second_rollout.generation.trace.token_ids_N, first_rollout.generation.trace.token_ids_N)
    # AdamW steps by the learning rate, whatever the size of a gradient: one of roundings alone may go either way
    most = 2 * (WARM["max_steps"] * config.warm_start.learning_rate + config.rl.learning_rate)
    weights, moments = tensors_of(state_there["model"]), [m for m in tensors_of(state_there["optimizer"]) if m.dim()]
    assert len(moments) >= 2 * (len(weights) - 2)
    assert all(isinstance(each, OnDevice) for each in weights + moments)
    for there, here in zip(weights, tensors_of(state["model"]), strict=True):
        torch.testing.assert_close(there.values_here, here, rtol=0, atol=most)
    assert record.device.type == DEVICE.type
    assert record.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def test_the_other_device_refuses_what_cuda_refuses():
    with other_device() as there:
        values = torch.ones(2, 3).to(DEVICE)
        with pytest.raises(MixedDevicesError):
            values + torch.ones(2, 3)
        with pytest.raises(MixedDevicesError):
            values.gather(1, torch.zeros(2, 1, dtype=torch.int64))
        assert isinstance(values[torch.tensor([0])] * torch.tensor(2.0), OnDevice)
        there.reads.clear()
        assert (values.sum() * 2).item() == 12
        assert values.cpu().tolist() == [[1.0] * 3] * 2
        assert len(values[values > 0]) == 6
        assert sum(there.reads.values()) == 3
