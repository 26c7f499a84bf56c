"""Rollouts whose engine lacked weights: which are refused, against k3 summed up token by token. verl is not needed."""

import math

import numpy as np
import pytest
import torch

from foreroute.errors import EngineError
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.verl.passes import K3_LIMIT, WeightsCheck


def rollout(log_ratio, *, seed=0, count=60):
    """Log-probs by both sides, which differ by so much, and which tokens were sampled: all."""
    rng = np.random.default_rng(seed)
    sampled = torch.from_numpy(rng.normal(-20, 1, 5 * count).astype(np.float32))
    return sampled, sampled + log_ratio, torch.ones(5 * count, dtype=torch.bool)


def judged(*parts, gather=lambda mine: [mine]):
    check = WeightsCheck()
    for part in parts:
        check.add(*MismatchSums().compare_tokens(*part))
    check.judge(gather)


def test_a_rollout_far_from_the_trainer_is_refused_with_its_k3():
    k3 = math.exp(0.6) - 1 - 0.6
    assert k3 > K3_LIMIT > math.exp(0.4) - 1 - 0.4
    with pytest.raises(EngineError, match=rf"are {k3:.3g} nats \(k3\) from the trainer's .*Weights did not arrive"):
        judged(rollout(0.6))
    judged(rollout(0.4))


def test_tokens_that_are_not_known_or_not_counted_are_left_out():
    sampled, trained, counted = rollout(0.6)
    judged((sampled, trained, ~counted))
    judged((sampled * np.nan, trained, counted))


def test_a_few_tokens_far_apart_end_no_run():
    sampled, trained, counted = rollout(0.0)
    trained[:: len(trained) // 5] += 8.0  # a k3 of 2,972 nats
    judged((sampled, trained, counted))


def test_sums_are_of_all_micro_batches_and_processes_and_start_anew():
    near, far = rollout(0.0, count=50), rollout(0.6, seed=1, count=50)
    with pytest.raises(EngineError, match="Weights did not arrive"):
        judged(far, near)
    judged(far, near, near)
    with pytest.raises(EngineError, match="Weights did not arrive"):
        judged(near, gather=lambda mine: [mine, {-1: (100.0, 100)}])
    check = WeightsCheck()
    check.add(*MismatchSums().compare_tokens(*far))
    with pytest.raises(EngineError, match="Weights did not arrive"):
        check.judge(lambda mine: [mine])
    check.judge(lambda mine: [mine])  # no token at all, as without log-probs of the rollout


@pytest.mark.parametrize(("far", "is_refused"), [((3, 4), False), ((5,), True), ((3, 4, 5), True)])
def test_tokens_of_older_weights_may_be_far_and_those_of_the_newest_may_not(far, is_refused):
    """In two processes, of which one has no token of the newest."""
    first, second = WeightsCheck(), WeightsCheck()
    for version, check in ((3, first), (4, first), (4, second), (5, second)):
        apart = rollout(0.9 if version in far else 0.0, count=400 if version in far else 20)
        check.add(*MismatchSums().compare_tokens(*apart), version)
    of_second = []
    second.judge(lambda mine: of_second.append(mine) or [])
    if not is_refused:
        first.judge(lambda mine: [mine, *of_second])
        return
    with pytest.raises(EngineError, match="Weights did not arrive"):
        first.judge(lambda mine: [mine, *of_second])
