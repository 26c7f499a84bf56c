"""The methods: losses and gradients against those of TRL's GRPOTrainer, its own code run on the same numbers, padded.

TRL computes the weights of a correction inside its generation, so that they are given to it here.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from foreroute.train import objective
from foreroute.train.config import RLConfig
from foreroute.train.objective import (
    clipped_ratio,
    coefficients,
    denominator,
    group_advantages,
    importance_of,
    token_losses,
)

TIS = {"correction": {"method": "tis", "high": 1.2}}


def case_of(seed):
    """Random sequences: the engine, the trainer before the update, and now, each a little further away."""
    rng, lengths = np.random.default_rng(seed), np.array([3, 1, 8, 5, 2, 7])
    old = -rng.exponential(1.0, int(lengths.sum())) - 0.1
    now, engine = (old + 0.3 * rng.standard_normal(len(old)) for _ in range(2))
    return SimpleNamespace(
        lengths=lengths, now=now, old=old, engine=engine, advantages=rng.standard_normal(len(lengths))
    )


def ours(case, config):
    now, old, engine, advantages, lengths = map(
        torch.from_numpy, (case.now, case.old, case.engine, case.advantages, case.lengths)
    )
    tokens = objective.Tokens(now.requires_grad_(), old, engine, advantages.repeat_interleave(lengths), lengths)
    losses = token_losses(tokens, config).losses_R
    weighted = coefficients(tokens.lengths_S, config.method, losses.dtype) * losses
    loss = weighted.sum() / denominator(case.lengths, config.method)
    loss.backward()
    return loss.item(), tokens.logprobs_R.grad.numpy()


def padded(case, values):
    rows = torch.from_numpy(values).split(case.lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl(case, *, loss_type, level="token", low=0.2, high=0.2, importance=None):
    """TRL's loss, and its gradient packed."""
    now = padded(case, case.now).requires_grad_()
    mask = (torch.arange(now.shape[1]) < torch.from_numpy(case.lengths)[:, None]).double()
    alone = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x, num_processes=1, sync_gradients=True)
    chosen = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_low": low, "epsilon_high": high}
    off = {"beta": 0.0, "off_policy_mask_threshold": None, "aux_loss_enabled": False, "_entropy_bonus_enabled": False}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (now, torch.zeros_like(now), None),
        accelerator=alone,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        max_completion_length=9,
        current_gradient_accumulation_steps=1,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=importance is not None,
        top_entropy_quantile=1.0,
        _metrics={"train": defaultdict(list)},
        **chosen | off,
    )
    inputs = dict.fromkeys(("prompt_ids", "prompt_mask"), torch.zeros(len(mask), 1)) | {
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": torch.from_numpy(case.advantages),
        "old_per_token_logps": padded(case, case.old),
        "importance_sampling_ratio": importance,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert not now.grad[mask == 0].any()
    return loss.item(), now.grad[mask == 1].numpy()


def require_same(seen, expected):
    assert seen[0] == pytest.approx(expected[0], rel=1e-12)
    np.testing.assert_allclose(seen[1], expected[1], rtol=1e-10, atol=1e-15)
    assert np.abs(expected[1]).max() > 1e-3


OF_TRL = {
    "dapo": ({"method": "dapo"}, {"loss_type": "dapo", "high": 0.28}),
    "gspo": ({"method": "gspo"}, {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
}
"""Of each method our configuration, and what TRL calls it."""


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("method", OF_TRL)
def test_losses_and_gradients_are_those_of_trl(method, corrected):
    config, options = OF_TRL[method]
    for seed in (11, 13):
        case = case_of(seed)
        weights = padded(case, np.minimum(np.exp(case.old - case.engine), 1.2)) if corrected else None
        found = ours(case, RLConfig(**config, **(TIS if corrected else {})))
        require_same(found, trl(case, importance=weights, **options))
        with pytest.raises(AssertionError):  # a control: another correction
            require_same(found, trl(case, importance=None if corrected else padded(case, case.engine), **options))


def test_advantages_by_hand():
    rewards = np.array([1, 0, 1, 0, 0.1 + 0.2, 0.3, 0.3, 0.3, 0, 0, 0, 1, 1e-12, 2e-12, 0, 0, 0, 0.5, 1, 0.5])
    groups = rewards.reshape(-1, 4)
    expected = (groups - groups.mean(axis=1, keepdims=True)) / np.array([0.5, np.inf, *groups[2:].std(axis=1)])[:, None]
    advantages, informative = group_advantages(rewards, 4)
    np.testing.assert_allclose(advantages, expected.reshape(-1), rtol=1e-9, atol=1e-12)
    assert informative.tolist() == [True] * 4 + [False] * 4 + [True] * 12
    assert advantages[4:8].tolist() == [0] * 4


def test_clipping_by_hand():
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    advantage = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses, clipped = clipped_ratio(ratio.log(), advantage, 0.2, 0.27)
    # the bound holds back gains above 1.27 and losses below 0.8, and lets the rest through
    assert losses.tolist() == pytest.approx([-2.0, -1.27, -0.5, 1.5, 0.8])
    assert clipped.tolist() == [False, True, False, False, True]


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
