"""Where a run computes: the key, the devices of processes, and every tensor of a step on one device."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.capture import Sampling
from foreroute.errors import ConfigError
from foreroute.testing.counting_device import DEVICE, MixedDevicesError, OnDevice, other_device
from foreroute.train import RunFolder, parse_config, ranks
from foreroute.train.chain import ChainTask
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import make_trainer
from foreroute.train.policy import make_engine, make_policy
from foreroute.train.prompts import make_task
from foreroute.train.ranks import find_device, num_started
from foreroute.train.warm_start import warm_start
from tests.tiers import grid
from tests.train.small_runs import always_informative, same_state, small_config, small_values, tensors_of

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


def test_processes_whose_backend_or_accelerators_do_not_fit_the_device_are_refused():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for backend, fits, other in (("cpu:gloo,cuda:gloo", cpu, cuda), ("cuda:nccl", cuda, cpu)):
        with patch.object(ranks.dist, "get_backend_config", lambda backend=backend: backend):
            ranks.require_backend(fits)
            with pytest.raises(ConfigError):
                ranks.require_backend(other)
    ranks.require_no_accelerator(cuda)
    # transformers takes what it sees
    with patch.object(torch.accelerator, "is_available", lambda: True), pytest.raises(ConfigError):
        ranks.require_no_accelerator(cpu)


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


WAYS = {
    "R3": {},
    "R2, gspo, corrected, checkpointed": {
        "rl": {"routing": "R2", "method": "gspo", "correction": {"kind": "tis"}},
        "model": {"gradient_checkpointing": True},
    },
}


@grid("way", WAYS, quick=0, day=1)
def test_a_step_mixes_no_devices_and_does_the_same_anywhere(way):
    config = small_config(**{"warm_start": WARM, "rollout": FEW, **WAYS[way]})
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


@pytest.mark.slow
def test_an_engine_in_low_precision_samples_there_by_a_seed_drawn_from_the_generator_it_is_given():
    config = small_config(warm_start=WARM, rollout={**FEW, "precision": "fp8"})

    def tokens(seed):
        task = make_task(config)
        engine = make_engine(config, make_policy(config, task, DEVICE))
        generator = torch.Generator().manual_seed(seed)
        problems = task.problems(2, 0, np.random.default_rng(0))
        generation = engine.generate([p.tokens for p in problems], Sampling(3, task.end_token, 2, 1.0), generator)
        return generation.trace.token_ids_N

    with other_device():
        first, again, other = tokens(1), tokens(1), tokens(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # whose values are real here
def test_a_checkpoint_of_one_device_is_taken_up_on_another(tmp_path):
    config = parse_config({**small_values(rollout=FEW), "warm_start": {"max_steps": 0}}, source="test")
    with other_device(generators=DEVICE):
        there = made(config, DEVICE)
        with patch.object(ChainTask, "rewards", always_informative):
            there.run_step()
        state = load_checkpoint(RunFolder(tmp_path).save_checkpoint(there.state(), data="", keep=1))
        assert all(tensor.device.type == "cpu" for tensor in tensors_of(state))
        back = made(config, DEVICE)
        back.restore(state)
        on_device = {name: value for name, value in back.state().items() if name != "sentinel"}  # which judges here
        assert {type(tensor) for tensor in tensors_of(on_device) if tensor.dim()} == {OnDevice}
        here = made(config, torch.device("cpu"))
        here.restore(state)
    for restored in (back, here):
        assert same_state(values_of(restored.state()), values_of(there.state()))


def values_of(value):
    if isinstance(value, dict):
        return {key: values_of(each) for key, each in value.items()}
    return getattr(value, "values_here", value)


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
