"""The reference trainer on the device."""

import math

import pytest
import torch

pytest.importorskip("pydantic")  # which configurations take

from foreroute.train import RunFolder, train
from tests.train.small_runs import small_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WARM = {"max_steps": 4, "batch_size": 8}


def config_of(device, steps=3):
    return small_config(device=device.type, rl={"steps": steps, "routing": "R3"}, warm_start=WARM)


def test_a_run_says_where_it_ran_and_goes_on_elsewhere(device, tmp_path):
    kinds = [device.type, "cpu", device.type]
    for done, kind in enumerate(kinds):
        train(config_of(torch.device(kind), steps=done + 1), tmp_path / "run", resume=done > 0)
    records = RunFolder(tmp_path / "run").records()
    assert [record.device.kind for record in records] == kinds
    assert all(record.device.name for record in records)
    assert [record.mismatch["replayed"].differing_share for record in records] == [0.0] * 3
    for record in records:
        assert all(math.isfinite(value) for value in (record.reward_mean, record.loss, record.grad_norm)), record.step
    if device.type == "cuda":
        assert max(record.device.peak_memory_bytes for record in records) > 0
