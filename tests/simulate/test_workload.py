"""The workload generator: whole numbers that are true, and the unevenness that it is calibrated to."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.errors import ConfigError
from foreroute.simulate.workload import WORKLOADS, Workload
from tests.tiers import grid

SMALL = Workload(
    num_ranks=4,
    num_experts=16,
    top_k=3,
    num_micro_steps=3,
    num_layers=2,
    sequences_per_rank=(1, 3),
    mean_length=60,
    longest=200,
    layer_evenness=0.6,
    micro_step_evenness=40,
    prompt_draws=8,
    response_draws=8,
)

CALIBRATION = {  # static imbalance; of the whole step; correlation micro-step/step and step/step; hottest expert / mean
    "G8": (1.38, 1.17, 0.58, 0.933, 5.6),
    "G16": (1.93, 1.77, 0.69, 0.963, 6.2),
    "G32": (2.68, 2.16, 0.72, 0.974, 6.6),
    "G64": (4.83, 4.11, 0.76, 0.978, 7.7),
    "E256": (3.57, 3.16, 0.80, 0.982, 9.8),
    # of the traces of part H in experiments/results.md, 4 and 8 sequences a rank dealt at random
    "R8": (1.42, 1.41, 0.975, 0.996, 3.3),
}


def imbalance(counts_CE, num_ranks):
    loads = counts_CE.reshape(*counts_CE.shape[:-1], num_ranks, -1).sum(axis=-1)
    return (loads.max(axis=-1) / loads.mean(axis=-1)).mean()


def correlation(a, b):
    return np.mean([np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)])


@grid("name", WORKLOADS, quick=1)
def test_the_presets_have_the_statistics_that_they_are_calibrated_to(name):
    workload = replace(WORKLOADS[name], num_layers=24)
    counts_MLE = workload.draw(seed=3).counts().sum(axis=2).astype(float)
    step_LE, next_LE = counts_MLE.sum(axis=0), workload.draw(seed=3, step=1).counts().sum(axis=(0, 2)).astype(float)
    static, whole, micro, steps, hottest = CALIBRATION[name]
    assert imbalance(counts_MLE, workload.num_ranks) == pytest.approx(static, rel=0.04)
    assert imbalance(step_LE, workload.num_ranks) == pytest.approx(whole, rel=0.12)
    assert np.mean([correlation(cell_LE, step_LE) for cell_LE in counts_MLE]) == pytest.approx(micro, abs=0.03)
    assert correlation(step_LE, next_LE) == pytest.approx(steps, abs=0.015)
    assert (counts_MLE.max(axis=-1) / counts_MLE.mean(axis=-1)).mean() == pytest.approx(hottest, rel=0.1)


def test_every_assignment_of_every_token_is_counted_once():
    step = SMALL.draw(seed=1)
    counts = step.counts()
    np.testing.assert_array_equal(counts, SMALL.draw(seed=1).counts())
    expected = np.zeros((SMALL.num_micro_steps, SMALL.num_ranks), np.int64)
    np.add.at(expected, (step.micro_step_S, step.rank_S), SMALL.top_k * step.rows_S)
    np.testing.assert_array_equal(counts.sum(axis=-1), np.repeat(expected[:, None], SMALL.num_layers, axis=1))
    fewest, most = SMALL.sequences_per_rank
    held = [np.sum((step.micro_step_S == m) & (step.rank_S == g)) for m in range(3) for g in range(4)]
    assert fewest <= min(held) < max(held) <= most


@pytest.mark.parametrize("top_k", [1, 15])
def test_tokens_of_every_sequence_can_pick_each_expert_once(top_k):
    step = replace(SMALL, top_k=top_k).draw(seed=2)
    for (m, layer), counts_GE in zip(np.ndindex(3, 2), step.counts().reshape(-1, 4, 16), strict=True):
        # a micro-step drawn alone is the same as in its step
        here_S, counts_SE = step.micro_step_S == m, step.sequence_counts(m, m + 1)[:, layer]
        assert (counts_SE <= step.rows_S[here_S, None]).all()
        assert (counts_SE.sum(axis=1) == top_k * step.rows_S[here_S]).all()
        assert np.array_equal([counts_SE[step.rank_S[here_S] == g].sum(axis=0) for g in range(4)], counts_GE)
        assert np.array_equal(step.sequence_counts()[here_S, layer], counts_SE)


@pytest.mark.parametrize("wrong", [{"top_k": 17}, {"top_k": 0}, {"prompt_draws": 0}, {"common": 1.0}], ids=str)
def test_what_would_be_drawn_for_ever_is_refused(wrong):
    with pytest.raises(ConfigError, match="drawn"):
        replace(SMALL, **wrong)
