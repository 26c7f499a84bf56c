"""The reference trainer on the device."""

import math

import pytest
import torch

pytest.importorskip("pydantic")  # which configurations take

from foreroute.train import RunFolder, train
from foreroute.train.folder import load_checkpoint
from foreroute.train.run import Watcher
from tests.gpu.bits import deterministic
from tests.train.small_runs import same_state, small_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WARM = {"max_steps": 4, "batch_size": 8}


def config_of(device, steps=3):
    return small_config(device=device.type, rl={"steps": steps, "routing": "R3"}, warm_start=WARM)


def test_a_resumed_run_ends_with_the_same_bits(device, tmp_path):
    config = config_of(device)
    with deterministic():
        whole = train(config, tmp_path / "whole")
        seen = []
        watcher = Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 2)
        train(config, tmp_path / "stopped", watcher=watcher)
        resumed = train(config, tmp_path / "stopped", resume=True)
        if not same_run(whole, resumed):
            again = train(config, tmp_path / "again")
            assert not same_run(whole, again), "a run repeats itself to the bit, and a resumed one does not"
            pytest.skip("the same run does not repeat its own bits here: a kernel adds in no fixed order")


def same_run(one, other):
    beside = {"seconds": {}, "device": None}
    ours, theirs = ([record.model_copy(update=beside) for record in run.records()] for run in (one, other))
    return ours == theirs and same_state(*(load_checkpoint(run.last_checkpoint()) for run in (one, other)))


def test_a_run_says_where_it_ran_and_goes_on_elsewhere(device, tmp_path):
    types = [device.type, "cpu", device.type]
    for done, asked in enumerate(types):
        train(config_of(torch.device(asked), steps=done + 1), tmp_path / "run", resume=done > 0)
    records = RunFolder(tmp_path / "run").records()
    assert [record.device.type for record in records] == types
    assert all(record.device.name for record in records)
    assert [record.mismatch["replayed"].differing_share for record in records] == [0.0] * 3
    for record in records:
        assert all(math.isfinite(value) for value in (record.reward_mean, record.loss, record.grad_norm)), record.step
    if device.type == "cuda":
        assert max(record.device.peak_memory_bytes for record in records) > 0
