"""Rollouts whose engine lacked weights: which are refused, against k3 summed up token by token. verl is not needed."""

import math

import numpy as np
import pytest
import torch

from foreroute.errors import EngineError
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.weights_check import K3_LIMIT, MOST_OF_A_TOKEN, WeightsCheck


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
