"""Losses and gradients against those of TRL's GRPOTrainer, its own code run on the same numbers, padded.

TRL computes the weights of a correction inside its generation, so that they are given to it here.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from foreroute.train.config import RLConfig
from tests.train.objective_oracle import Case
from tests.train.test_objective import ours

LENGTHS = [3, 1, 8, 5, 2, 7]


def padded(case, values):
    """[B, T] with zeros behind the tokens."""
    rows = [torch.from_numpy(values[start:end]) for start, end in case.spans()]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl(case, *, loss_type, level="token", low=0.2, high=0.2, importance=None):
    """TRL's loss, and its gradient packed."""
    now = padded(case, case.now).requires_grad_()
    mask = (torch.arange(now.shape[1]) < torch.from_numpy(case.lengths)[:, None]).double()
    alone = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x, num_processes=1, sync_gradients=True)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (now, torch.zeros_like(now), None),
        accelerator=alone,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=0.0,
        max_completion_length=9,
        current_gradient_accumulation_steps=1,
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=importance is not None,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    nothing = torch.zeros(len(mask), 1)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
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


METHODS = {
    "dapo": {"loss_type": "dapo", "high": 0.28},
    "gspo": {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_that_of_trl(method):
    case = Case.random(11, lengths=LENGTHS)
    require_same(ours(case, RLConfig(method=method)), trl(case, **METHODS[method]))


@pytest.mark.parametrize("method", METHODS)
def test_a_correction_takes_part_as_in_trl(method):
    case = Case.random(13, lengths=LENGTHS)
    weights = np.minimum(np.exp(case.old - case.engine), 1.3)
    config = RLConfig(method=method, correction={"kind": "tis", "high": 1.3})
    require_same(ours(case, config), trl(case, importance=padded(case, weights), **METHODS[method]))


def test_another_method_is_not_that_of_trl():
    case = Case.random(14, lengths=LENGTHS)
    for wrong, right in (("dapo", "gspo"), ("gspo", "dapo")):
        with pytest.raises(AssertionError):
            require_same(ours(case, RLConfig(method=wrong)), trl(case, **METHODS[right]))
