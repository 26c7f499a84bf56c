"""The methods: by hand, against loops over tokens with differences for gradients, in their limits, and broken."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from foreroute.train import objective
from foreroute.train.config.rl import METHODS, RLConfig
from foreroute.train.objective import (
    accepted_sequences,
    cispo,
    clipped_ratio,
    coefficients,
    correction_weights,
    denominator,
    engine_ratio,
    group_advantages,
    kl_to_reference,
    policy_log_ratio,
    reinforce,
)
from tests.train.objective_oracle import Case, differences, mini_batch_loss

CORRECTIONS = {
    "none": {},
    "tis": {"correction": {"kind": "tis", "high": 1.2}},
    "tis_sequence": {"correction": {"kind": "tis", "level": "sequence", "high": 1.5}},
    "mis": {"correction": {"kind": "mis", "high": 1.3}},
    "mis_sequence": {"correction": {"kind": "mis", "level": "sequence", "high": 1.5}},
    "icepop": {"correction": {"kind": "icepop", "low": 0.8, "high": 1.3}},
}


def tensors(case, sequences=None):
    """Tokens of a case, or of some of its sequences; the first tensor asks for gradients."""
    chosen = np.arange(len(case.lengths)) if sequences is None else np.array(sequences, np.int64)
    rows = np.concatenate([np.zeros(0, np.int64), *[np.arange(*case.spans()[s]) for s in chosen]])
    now, old, engine, reference = (
        torch.from_numpy(values[rows]) for values in (case.now, case.old, case.engine, case.reference)
    )
    lengths = torch.from_numpy(case.lengths[chosen])
    advantages = torch.from_numpy(case.advantages[chosen]).repeat_interleave(lengths)
    return objective.Tokens(now.requires_grad_(), old, engine, reference, advantages, lengths), rows


def ours(case, config, cut=None):
    """Loss and gradient of a case, taken at once or in the given micro-batches."""
    divisor = denominator(case.lengths, config.mean)
    loss, gradient = 0.0, np.zeros_like(case.now)
    for part in cut or [range(len(case.lengths))]:
        tokens, rows = tensors(case, part)
        if not config.kl_coefficient:
            tokens = tokens._replace(reference_logprobs_R=None)
        losses = objective.token_losses(tokens, config).losses_R
        weights = coefficients(tokens.lengths_S, config.mean, case.max_length, losses.dtype)
        summed = (weights * losses).sum() / divisor
        summed.backward()
        loss += summed.item()
        gradient[rows] = tokens.logprobs_R.grad.numpy()
    return loss, gradient


def require_right(case, config):
    loss, gradient = ours(case, config)
    assert loss == pytest.approx(mini_batch_loss(case, config, case.now, case.now), rel=1e-12)
    np.testing.assert_allclose(gradient, differences(case, config), atol=2e-9, rtol=2e-6)
    assert np.abs(gradient).max() > 1e-3, "the case has no gradient"


def test_advantages_by_hand():
    rewards = np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 1.0])
    tail = np.array([-0.25, -0.25, -0.25, 0.75])
    advantages, informative = group_advantages(rewards, 4)
    np.testing.assert_allclose(advantages, [1, -1, 1, -1, 0, 0, 0, 0, *(tail / np.std([0, 0, 0, 1]))])
    assert informative.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    plain, same = group_advantages(rewards, 4, "group_mean")
    np.testing.assert_allclose(plain, [0.5, -0.5, 0.5, -0.5, 0, 0, 0, 0, *tail])
    assert np.array_equal(same, informative)


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_rewards_that_differ_by_rounding_are_equal(kind):
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 0.3, 1e-12, 2e-12, 0.0, 0.0])
    advantages, informative = group_advantages(rewards, 4, kind)
    assert informative.tolist() == [False] * 4 + [True] * 4
    assert advantages[:4].tolist() == [0] * 4


def test_a_reward_at_the_mean_of_its_group_still_counts():
    advantages, informative = group_advantages(np.array([0.0, 0.5, 1.0, 0.5]), 4)
    assert advantages[1] == 0
    assert informative.all()


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
def test_advantages_do_not_move_with_the_rewards(kind):
    rewards = np.random.default_rng(0).random(24)
    advantages, _ = group_advantages(rewards, 6, kind)
    np.testing.assert_allclose(group_advantages(rewards + 3, 6, kind)[0], advantages, atol=1e-12)
    scaled, _ = group_advantages(5 * rewards, 6, kind)
    np.testing.assert_allclose(scaled, advantages * (1 if kind == "group_std" else 5), atol=1e-12)
    np.testing.assert_allclose(advantages.reshape(4, 6).sum(axis=1), 0, atol=1e-12)


def test_clipping_by_hand():
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses, clipped = clipped_ratio(ratio.log(), advantage, 0.2, 0.27)
    # the bound holds back gains above 1.27 and losses below 0.8, and lets the rest through
    assert losses.tolist() == pytest.approx([-2.0, -1.27, -0.5, 1.5, 0.8])
    assert clipped.tolist() == [False, True, False, False, True]


def test_clipped_tokens_have_no_gradient():
    logprobs = torch.tensor([1.5, 0.5]).log().requires_grad_()
    clipped_ratio(logprobs, torch.ones(2), 0.2, 0.27).losses_R.sum().backward()
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1] == pytest.approx(-0.5)


def test_the_ratio_of_a_response_by_hand():
    old = torch.zeros(3, dtype=torch.float64)
    now = torch.tensor([1.0, 3.0, -4.0], dtype=torch.float64)
    assert policy_log_ratio(now, old, torch.tensor([2, 1]), "sequence").tolist() == [2.0, 2.0, -4.0]
    assert policy_log_ratio(now, old, torch.tensor([2, 1]), "token").tolist() == [1.0, 3.0, -4.0]


def test_gspo_by_hand():
    """Two responses, one of two tokens with s = 1.1 and A = 2, one of one token with s = 0.5 and A = -1."""
    config = RLConfig(method="gspo", clip_low=0.2, clip_high=0.2)
    case = Case.random(0, lengths=[2, 1])
    case.now, case.old = np.log([1.21, 1.0, 0.5]), np.zeros(3)
    case.advantages = np.array([2.0, -1.0])
    loss, gradient = ours(case, config)
    assert loss == pytest.approx((-1.1 * 2 + 0.8) / 2)
    np.testing.assert_allclose(gradient, [-1.1 * 2 / 2 / 2, -1.1 * 2 / 2 / 2, 0])


def test_cispo_by_hand():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    log_ratio = logprobs - torch.tensor([-1.0, -2.0 - math.log(8), -3.0 + math.log(4)], dtype=torch.float64)
    losses, clipped = cispo(logprobs, log_ratio, torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64), 1.0, 4.0)
    assert losses.tolist() == pytest.approx([2.0, -10.0, 0.75])
    assert clipped.tolist() == [False, True, False]
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 5.0, -0.25])  # capped, not dropped


def test_reinforce_by_hand():
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    logprobs = torch.full((5,), -2.0, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses, masked = reinforce(logprobs, ratio.log(), advantage, 0.2, 0.27)
    assert masked.tolist() == [False, True, False, False, True]
    losses.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 0.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", 0, math.inf, [1, 1, 1, 1, 1]),
        ("tis", 0, 2.0, [0.1, 0.5, 1, 2, 2]),
        ("mis", 0, 2.0, [0.1, 0.5, 1, 2, 0]),
        ("icepop", 0.5, 2.0, [0, 0.5, 1, 2, 0]),
    ],
)
def test_corrections_by_hand(kind, low, high, expected):
    ratio = torch.tensor([0.1, 0.5, 1.0, 2.0, 7.0])
    assert correction_weights(ratio, kind, low, high).tolist() == pytest.approx(expected)


def test_the_ratio_to_the_engine_by_hand():
    now, engine = torch.tensor([2.0, 3.0, 4.0]).log().requires_grad_(), torch.tensor([1.0, 2.0, 8.0]).log()
    lengths = torch.tensor([2, 1])
    assert engine_ratio(now, engine, lengths, "token").tolist() == pytest.approx([2, 1.5, 0.5])
    product = engine_ratio(now, engine, lengths, "sequence")
    assert product.tolist() == pytest.approx([3, 3, 0.5])
    assert not product.requires_grad


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", 0, math.inf, [True, True, True]),
        ("sequence", 0.4, 3.5, [False, True, True]),  # 4, 1, 0.5
        ("geometric", 0.6, 2.5, [True, True, False]),  # 2, 1, 0.5
    ],
)
def test_rejection_by_hand(kind, low, high, expected):
    now, engine = torch.tensor([4.0, 1.0, 2.0, 0.5, 0.5]).log(), torch.zeros(5)
    assert accepted_sequences(now, engine, torch.tensor([2, 2, 1]), kind, low, high).tolist() == expected


def test_a_ratio_beyond_all_numbers_is_cut_and_not_spread():
    gap = torch.tensor([500.0, 400.0, 0.0, 0.0])
    ratio = engine_ratio(gap, torch.zeros(4), torch.tensor([2, 2]), "sequence")
    assert correction_weights(ratio, "tis", 0, 2.0).tolist() == [2, 2, 1, 1]
    assert correction_weights(ratio, "mis", 0, 2.0).tolist() == [0, 0, 1, 1]
    assert accepted_sequences(gap, torch.zeros(4), torch.tensor([2, 2]), "geometric", 0.5, 2).tolist() == [False, True]


def test_the_penalty_estimates_the_divergence():
    """Its expectation under the policy, summed over a whole vocabulary, is KL(policy || reference)."""
    logits = torch.randn(2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policy, reference = logits.log_softmax(-1)
    penalty = kl_to_reference(policy, reference)
    assert (penalty > 0).all()
    expected = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * penalty).sum().item() == pytest.approx(expected.item(), rel=1e-12)
    assert not kl_to_reference(policy, policy).any()


BOUNDS = {"cispo": {"clip_high": 0.3}, "gspo": {"clip_low": 0.05, "clip_high": 0.05}}  # some tokens on either side


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients(method, correction):
    parts = {"correction": {}} | BOUNDS.get(method, {}) | CORRECTIONS[correction]
    require_right(Case.random(0), RLConfig(method=method, **parts))
    require_right(Case.random(1), RLConfig(method=method, kl_coefficient=0.1, **parts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", [[[0, 1], [2, 3, 4, 5]], [[5], [3, 0], [], [1, 2, 4]]])
def test_the_cut_into_micro_batches_does_not_matter(method, cut):
    config = RLConfig(method=method, kl_coefficient=0.1)
    case = Case.random(2)
    for seen, whole in zip(ours(case, config, cut), ours(case, config), strict=True):
        np.testing.assert_allclose(seen, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
def test_without_mismatch_a_correction_changes_no_bit(method, correction):
    case = Case.random(3)
    case.engine = case.old.copy()
    if method == "minirl":  # corrects the policy as it is now
        case.old = case.engine = case.now.copy()
    uncorrected = ours(case, RLConfig(method=method, correction={"kind": "none"}))
    corrected = ours(case, RLConfig(method=method, **CORRECTIONS[correction]))
    assert uncorrected[0] == corrected[0]
    assert np.array_equal(uncorrected[1], corrected[1])


def test_before_the_first_step_all_losses_have_one_gradient():
    """-A at every token: bounds and importance weights come in with the first difference."""
    case = Case.random(4)
    case.now = case.old.copy()
    expected = -np.repeat(case.advantages, case.lengths) / case.lengths.sum()
    for name in ("clip", "cispo", "reinforce"):
        _, gradient = ours(case, RLConfig(loss=name))
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    weights = 1 / (len(case.lengths) * np.repeat(case.lengths, case.lengths))
    for method in ("grpo", "gspo"):
        _, gradient = ours(case, RLConfig(method=method))
        np.testing.assert_allclose(gradient, expected * case.lengths.sum() * weights, rtol=1e-12)


def test_gspo_on_responses_of_one_token_is_grpo():
    case = Case.random(5, lengths=[1] * 6)
    bounds = {"clip_low": 0.1, "clip_high": 0.15}
    for seen, expected in zip(
        ours(case, RLConfig(method="gspo", **bounds)), ours(case, RLConfig(method="grpo", **bounds)), strict=True
    ):
        assert np.array_equal(seen, expected)


def test_a_cispo_that_never_caps_is_off_policy_reinforce():
    case = Case.random(6)
    for seen, expected in zip(
        ours(case, RLConfig(loss="cispo", clip_low=1.0, clip_high=1e9)),
        ours(case, RLConfig(loss="reinforce", clip_low=1.0, clip_high=1e9)),
        strict=True,
    ):
        np.testing.assert_allclose(seen, expected, rtol=1e-12)


def sign_flipped(log_ratio_R, advantages_R, clip_low, clip_high):
    losses_R, clipped_R = clipped_ratio(log_ratio_R, advantages_R, clip_low, clip_high)
    return objective.Surrogate(-losses_R, clipped_R)


def with_gradient_through_the_weight(logprobs_R, log_ratio_R, advantages_R, clip_low, clip_high):
    weight_R = log_ratio_R.exp().clamp(1 - clip_low, 1 + clip_high)
    return objective.Surrogate(-weight_R * advantages_R * logprobs_R, weight_R > 1)


def with_gradient_through_the_ratio(logprobs_R, engine_logprobs_R, lengths_S, level):
    return (logprobs_R - engine_logprobs_R).exp()


@pytest.mark.parametrize(
    ("method", "function", "broken"),
    [
        ("grpo", "clipped_ratio", sign_flipped),
        ("cispo", "cispo", with_gradient_through_the_weight),
        ("minirl", "engine_ratio", with_gradient_through_the_ratio),
        ("gspo", "policy_log_ratio", lambda now, old, lengths, level: now - old),
        ("dapo", "kl_to_reference", lambda now, reference: kl_to_reference(reference, now)),
    ],
)
def test_a_broken_method_is_seen(monkeypatch, method, function, broken):
    config = RLConfig(method=method, kl_coefficient=0.1)
    require_right(Case.random(7), config)
    monkeypatch.setattr(objective, function, broken)
    with pytest.raises(AssertionError):
        require_right(Case.random(7), config)


def part_of(case, sequences):
    tokens, rows = tensors(case, sequences)
    policies = (values[rows] for values in (case.now, case.old, case.engine, case.reference))
    return Case(tokens.lengths_S.numpy(), *policies, case.advantages[sequences])


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
def test_a_mean_of_means_is_seen(mean):
    """What dividing each micro-batch by its own size would give."""
    case, cut = Case.random(8), [[0], [1, 2, 3, 4, 5]]
    config = RLConfig(mean=mean)
    losses = [ours(part_of(case, part), config)[0] for part in cut]
    assert abs(np.mean(losses) - ours(case, config)[0]) > 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio": "sequence"}, 'set mean = "sequence"'),
        ({"method": "gspo", "loss": "cispo"}, 'needs ratio = "token"'),
        ({"method": "GRPO"}, "'grpo', 'dr_grpo'"),
        ({"correction": {"high": 2.0}}, "change nothing without a kind"),
        ({"correction": {"kind": "tis", "low": 0.5}}, "no lower bound"),
        ({"correction": {"kind": "icepop", "level": "sequence"}}, "icepop drops tokens"),
        ({"correction": {"kind": "icepop", "low": 6.0}}, r"low = 6\.0 is not below high = 5\.0"),
        ({"rejection": {"low": 0.5}}, "change nothing without a kind"),
        ({"rejection": {"kind": "geometric", "low": 0.5}}, "needs low and high"),
        ({"rejection": {"kind": "geometric", "low": 2.0, "high": 1.0}}, "is not below high"),
        ({"kl_coefficient": -1.0}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        RLConfig(**values)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_sets_what_is_not_given(method):
    config = RLConfig(method=method)
    for key, value in METHODS[method].items():
        seen = getattr(config, key)
        assert seen == value if key != "correction" else (seen.kind, seen.high) == ("tis", 5.0)
    assert RLConfig(**config.model_dump()) == config
    assert RLConfig(method=method, clip_high=0.5).clip_high == 0.5
