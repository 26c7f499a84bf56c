"""The methods: against loops over tokens with differences for gradients, and broken; what bounds cut, by hand."""

import math

import numpy as np
import pytest
import torch

from foreroute.train import objective
from foreroute.train.config import METHODS, RLConfig
from foreroute.train.objective import (
    clipped_ratio,
    coefficients,
    denominator,
    group_advantages,
    importance_of,
    token_losses,
)
from tests.train.objective_oracle import Case, differences, mini_batch_loss

TIS = {"correction": {"kind": "tis", "high": 1.2}}
CORRECTIONS = {"none": {}, "tis": TIS}


def tensors(case, sequences=None):
    """Tokens of a case, or of some of its sequences; the first tensor asks for gradients."""
    chosen = np.arange(len(case.lengths)) if sequences is None else np.array(sequences, np.int64)
    rows = np.concatenate([np.zeros(0, np.int64), *[np.arange(*case.spans()[s]) for s in chosen]])
    now, old, engine = (torch.from_numpy(values[rows]) for values in (case.now, case.old, case.engine))
    lengths = torch.from_numpy(case.lengths[chosen])
    advantages = torch.from_numpy(case.advantages[chosen]).repeat_interleave(lengths)
    return objective.Tokens(now.requires_grad_(), old, engine, advantages, lengths), rows


def ours(case, config):
    """Loss and gradient of a case."""
    tokens, _ = tensors(case)
    losses = token_losses(tokens, config).losses_R
    weighted = coefficients(tokens.lengths_S, config.method, losses.dtype) * losses
    loss = weighted.sum() / denominator(case.lengths, config.method)
    loss.backward()
    return loss.item(), tokens.logprobs_R.grad.numpy()


def require_right(case, config):
    loss, gradient = ours(case, config)
    assert loss == pytest.approx(mini_batch_loss(case, config, case.now), rel=1e-12)
    np.testing.assert_allclose(gradient, differences(case, config), atol=2e-9, rtol=2e-6)
    assert np.abs(gradient).max() > 1e-3, "the case has no gradient"


def test_advantages_by_hand():
    rewards = np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0])
    tail = np.array([-0.25, -0.25, -0.25, 0.75])
    advantages, informative = group_advantages(rewards, 4)
    np.testing.assert_allclose(advantages, [1, -1, 1, -1, 0, 0, 0, 0, *(tail / np.std([0, 0, 0, 1]))])
    assert informative.tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 0.3, 1e-12, 2e-12, 0.0, 0.0])
    advantages, informative = group_advantages(rewards, 4)
    assert informative.tolist() == [False] * 4 + [True] * 4
    assert advantages[:4].tolist() == [0] * 4


def test_a_reward_at_the_mean_of_its_group_still_counts():
    advantages, informative = group_advantages(np.array([0.0, 0.5, 1.0, 0.5]), 4)
    assert advantages[1] == 0
    assert informative.all()


def test_advantages_do_not_move_with_the_rewards():
    rewards = np.random.default_rng(0).random(24)
    advantages, _ = group_advantages(rewards, 6)
    np.testing.assert_allclose(group_advantages(5 * rewards + 3, 6)[0], advantages, atol=1e-12)
    np.testing.assert_allclose(advantages.reshape(4, 6).sum(axis=1), 0, atol=1e-12)


def test_clipping_by_hand():
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses, clipped = clipped_ratio(ratio.log(), advantage, 0.2, 0.27)
    # the bound holds back gains above 1.27 and losses below 0.8, and lets the rest through
    assert losses.tolist() == pytest.approx([-2.0, -1.27, -0.5, 1.5, 0.8])
    assert clipped.tolist() == [False, True, False, False, True]


def weights_of(rho, config):
    tokens = objective.Tokens(*([torch.zeros(len(rho))] * 2), -torch.tensor(rho).log(), torch.ones(len(rho)), None)
    return token_losses(tokens._replace(lengths_S=torch.tensor([len(rho)])), config)


def test_corrections_by_hand():
    rho = [0.1, 0.5, 1.0, 2.0, 7.0]
    cut = weights_of(rho, RLConfig(correction={"kind": "tis", "high": 2.0}))
    assert cut.weights_R.tolist() == pytest.approx([0.1, 0.5, 1, 2, 2])
    assert cut.cut_R.tolist() == [False] * 4 + [True]
    assert cut.losses_R.tolist() == pytest.approx([-0.1, -0.5, -1, -2, -2])
    none = weights_of(rho, RLConfig())
    assert (none.weights_R.tolist(), none.cut_R.any(), none.losses_R.tolist()) == ([1] * 5, False, [-1] * 5)


def test_a_ratio_beyond_all_numbers_is_cut_and_counted():
    """e^500 is beyond float32 and e^800 beyond float64; in logarithms, token by token, shares are exact."""
    log_rho = torch.tensor([800.0, 500.0, 0.0, 0.0])
    tokens = objective.Tokens(*([torch.zeros(4)] * 2), -log_rho, torch.ones(4), torch.tensor([4]))
    seen = token_losses(tokens, RLConfig(**TIS))
    assert seen.weights_R.tolist() == pytest.approx([1.2, 1.2, 1, 1])
    of_tokens = [seen.clipped_R, seen.log_ratio_R, seen.weights_R, seen.cut_R]
    importance, _ = importance_of(np.stack([each.double().numpy() for each in of_tokens]))
    assert importance.ratio_max == pytest.approx(np.finfo(np.float64).max, rel=1e-9)
    assert importance.effective_share == pytest.approx(1 / 4)
    assert math.isfinite(importance.ratio_mean)
    none, clipped = importance_of(np.zeros((4, 0)))
    assert ({*vars(none).values()}, clipped) == ({0}, 0)


BOUNDS = {"gspo": {"clip_low": 0.05, "clip_high": 0.05}}  # some tokens on either side


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients(method, correction):
    for seed in (0, 1):
        parts = BOUNDS.get(method, {}) | CORRECTIONS[correction]
        require_right(Case.random(seed), RLConfig(method=method, **parts))


def sign_flipped(log_ratio_R, advantages_R, clip_low, clip_high):
    losses_R, clipped_R = clipped_ratio(log_ratio_R, advantages_R, clip_low, clip_high)
    return -losses_R, clipped_R


@pytest.mark.parametrize(
    ("method", "function", "broken"),
    [
        ("dapo", "clipped_ratio", sign_flipped),
        ("gspo", "policy_log_ratio", lambda now, old, lengths, method: now - old),
    ],
)
def test_a_broken_method_is_seen(monkeypatch, method, function, broken):
    config = RLConfig(method=method, **TIS)
    require_right(Case.random(7), config)
    monkeypatch.setattr(objective, function, broken)
    with pytest.raises(AssertionError):
        require_right(Case.random(7), config)


def test_a_correction_that_is_left_out_is_seen():
    loss, _ = ours(Case.random(7), RLConfig())
    assert loss != pytest.approx(mini_batch_loss(Case.random(7), RLConfig(**TIS), Case.random(7).now), rel=1e-3)


def part_of(case, sequences):
    tokens, rows = tensors(case, sequences)
    policies = (values[rows] for values in (case.now, case.old, case.engine))
    return Case(tokens.lengths_S.numpy(), *policies, case.advantages[sequences])


@pytest.mark.parametrize("method", METHODS)
def test_a_mean_of_means_is_seen(method):
    """What dividing each micro-batch by its own size would give."""
    case, cut, config = Case.random(8), [[0], [1, 2, 3, 4, 5]], RLConfig(method=method)
    losses = [ours(part_of(case, part), config)[0] for part in cut]
    assert abs(np.mean(losses) - ours(case, config)[0]) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_method_sets_what_is_not_given(method):
    config = RLConfig(method=method, correction={"kind": "tis"})
    assert {key: getattr(config, key) for key in METHODS[method]} == METHODS[method]
    assert config.correction.high == 2
    assert RLConfig(**config.model_dump()) == config
    assert RLConfig(method=method, clip_high=0.5).clip_high == 0.5
