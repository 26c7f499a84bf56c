"""Sums of a trainer against the measures of whole arrays, and log-probs that are none."""

import numpy as np
import pytest
import torch

from foreroute.errors import InputError
from foreroute.mismatch import token_mismatch
from foreroute.trainers.mismatch_sums import MismatchSums


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
