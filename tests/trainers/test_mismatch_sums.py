"""Sums of a trainer on a device that counts waits of the host, against the measures on the host."""

import numpy as np
import pytest
import torch

from foreroute.errors import InputError
from foreroute.mismatch import token_mismatch
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trainers.mismatch_sums import MismatchSums

AT_ONCE = lambda sums: sums  # noqa: E731  of one process


def drawn(seed, shape=(4, 9)):
    """Log-probs of both sides, unknown and padded ones among them, and which count."""
    rng = np.random.default_rng(seed)
    sampled = rng.normal(-5, 1, shape).astype(np.float32)
    trained = sampled + rng.normal(0, 0.8, shape).astype(np.float32)
    counted = rng.random(shape) < 0.7
    trained[~counted] = np.inf
    sampled[0, :3] = np.nan
    return sampled, trained, counted


def test_tokens_are_compared_on_the_device_and_read_once():
    parts = [drawn(seed) for seed in range(3)]
    with other_device() as device:
        sums = MismatchSums()
        for part in parts:
            there = [torch.from_numpy(each).to(DEVICE) for each in part]
            device.reads.clear()
            log_r, counted = sums.compare_tokens(*there)
            assert not device.reads
        known = part[2] & ~np.isnan(part[0])
        assert counted.values_here.numpy().tolist() == known.tolist()
        assert np.array_equal(
            log_r.values_here[known].numpy(), part[1][known].astype(np.float64) - part[0][known].astype(np.float64)
        )
        logs = sums.flush(AT_ONCE)
        assert dict(device.reads) == {"to the host": 1}
        assert not sums.flush(AT_ONCE)
    known = [counted & ~np.isnan(sampled) for sampled, _, counted in parts]
    sides = [np.concatenate([part[side][at] for part, at in zip(parts, known, strict=True)]) for side in (1, 0)]
    expected = token_mismatch(*sides)
    assert logs == {
        "mismatch/k3": pytest.approx(expected.k3, rel=1e-12),
        "mismatch/f2": pytest.approx(expected.above[1] / expected.count, rel=1e-12),
    }


@pytest.mark.parametrize(("side", "name", "value"), [(0, "the rollout", np.inf), (1, "the trainer", 0.5)])
def test_a_log_prob_that_is_none_is_refused_where_it_counts(side, name, value):
    sums, part = MismatchSums(), drawn(0)
    part[side][2, 4] = value
    for counts in (False, True):
        part[2][2, 4] = counts
        sums.compare_tokens(*map(torch.from_numpy, part))
        if not counts:
            assert sums.flush(AT_ONCE)
    with pytest.raises(InputError, match=f"log-probs of {name} hold 1 numbers"):
        sums.flush(AT_ONCE)
