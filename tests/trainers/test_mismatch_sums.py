"""Sums of a trainer on a device that counts waits of the host, against the measures on the host."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.errors import InputError
from foreroute.mismatch import token_mismatch
from foreroute.replay import ReplayCounts
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trainers import mismatch_sums
from foreroute.trainers.mismatch_sums import MismatchSums

UNTOUCHED = SimpleNamespace(listening=lambda *_: None)
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


@pytest.mark.parametrize(("side", "name"), [(0, "the rollout"), (1, "the trainer")])
@pytest.mark.parametrize("value", [np.inf, 0.5])
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


class Counted(ReplayCounts):
    """Ten rows in three layers, of which three decisions differ, in two rows."""

    sums = property(lambda self: dict(zip(self.NAMES, torch.tensor([10, 2, 30, 3, 6]), strict=True)))


def test_counts_of_passes_are_added_over_ranks_by_what_their_pass_is(monkeypatch):
    sums = MismatchSums()
    sums.counting(UNTOUCHED, update=False)  # no pass
    assert not sums.flush(AT_ONCE)
    monkeypatch.setattr(mismatch_sums, "ReplayCounts", Counted)
    sums.counting(UNTOUCHED, update=False)
    assert sums.flush(AT_ONCE) == {"mismatch/disagreement": 0.1, "mismatch/disagreement_tokens": 0.2}
    sums.has_old_pass = True
    sums.counting(UNTOUCHED, update=True)
    sums.reduce_routes(lambda sums: 2 * sums)  # of two ranks that share rows: all of them
    sums.compare_tokens(*map(torch.from_numpy, drawn(0)))
    logs = sums.flush(lambda sums: 3 * sums)
    assert logs["mismatch/native_disagreement"] == 0.2
    assert "mismatch/disagreement" not in logs


def test_a_count_that_no_metric_is_made_of_is_refused(monkeypatch):
    monkeypatch.setattr(ReplayCounts, "NAMES", ("lines", *ReplayCounts.NAMES[1:]))
    monkeypatch.setattr(mismatch_sums, "ReplayCounts", Counted)
    sums = MismatchSums()
    sums.counting(UNTOUCHED, update=False)
    with pytest.raises(InputError, match=r"metric.*lines"):
        sums.flush(AT_ONCE)
