"""Sums of a trainer against the measures of whole arrays, log-probs that are none, and rollouts of other weights."""

import math

import numpy as np
import pytest
import torch

from foreroute.errors import EngineError, InputError
from foreroute.mismatch import token_mismatch
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.weights_check import K3_LIMIT, MOST_OF_A_TOKEN, WeightsCheck


@pytest.mark.parametrize(("side", "name", "value"), [(0, "the rollout", np.inf), (1, "the trainer", 0.5)])
def test_tokens_that_are_known_and_count_are_compared_and_no_log_prob_may_be_above_zero(side, name, value):
    rng, sums = np.random.default_rng(0), MismatchSums()
    sampled = rng.normal(-5, 1, (4, 9)).astype(np.float32)
    trained = sampled + rng.normal(0, 0.8, (4, 9)).astype(np.float32)
    counted = rng.random((4, 9)) < 0.7
    trained[~counted], sampled[0, :3] = np.inf, np.nan
    (sampled, trained)[side][2, 4] = value
    for counts in (False, True):
        counted[2, 4] = counts
        sums.compare_tokens(*map(torch.from_numpy, (sampled, trained, counted)))
        if not counts:
            known = counted & ~np.isnan(sampled)
            expected = token_mismatch(trained[known], sampled[known])
            assert sums.flush(lambda sums: sums) == {
                "mismatch/k3": pytest.approx(expected.k3, rel=1e-12),
                "mismatch/f2": pytest.approx(expected.above[1] / expected.count, rel=1e-12),
            }
    with pytest.raises(InputError, match=f"log-probs of {name} hold 1 numbers"):
        sums.flush(lambda sums: sums)


def test_refused_is_what_a_loop_over_tokens_finds_too_far_of_all_and_of_the_newest_weights():
    """Two processes, several versions, tokens that are not known or do not count, and a few that are far apart."""
    rng, seen = np.random.default_rng(0), []
    for _ in range(200):
        checks, tokens = [WeightsCheck(), WeightsCheck()], []
        for version, check in rng.permutation([(v, check) for v in (3, 4, 5) for check in (0, 1)]):
            count = int(rng.integers(0, 40))
            apart = rng.choice([0.0, 0.4, 0.6, 0.9]) + np.where(rng.random(count) < 0.02, 8.0, 0.0)
            sampled, counted = rng.normal(-20, 1, count).astype(np.float32), rng.random(count) < 0.9
            trained = sampled + apart.astype(np.float32)
            sampled[rng.random(count) < 0.1] = np.nan
            given = map(torch.from_numpy, (sampled, trained, counted))
            checks[check].add(*MismatchSums().compare_tokens(*given), int(version))
            known = counted & ~np.isnan(sampled)
            log_r = trained[known].astype(float) - sampled[known]
            tokens += [(int(version), min(math.expm1(x) - x, MOST_OF_A_TOKEN)) for x in log_r]
        newest = max(version for version, _ in tokens)
        means = [np.mean([k3 for version, k3 in tokens if version >= least]) for least in (0, newest)]
        of_second = []
        checks[1].judge(lambda mine, sums=of_second: sums.append(mine) or [])
        seen.append(min(means) > K3_LIMIT)
        if seen[-1]:
            with pytest.raises(EngineError, match=r"Weights.*arrive") as refused:
                checks[0].judge(lambda mine, sums=of_second: [mine, *sums])
            assert f"are {means[1]:.3g} nats (k3)" in str(refused.value)
        else:
            checks[0].judge(lambda mine, sums=of_second: [mine, *sums])
        checks[0].judge(lambda mine: [mine])  # sums start anew: no token at all, as without log-probs of the rollout
    assert 40 < sum(seen) < 160
    assert math.exp(0.6) - 1 - 0.6 > K3_LIMIT > math.exp(0.4) - 1 - 0.4
