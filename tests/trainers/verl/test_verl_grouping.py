"""Gradients of verl's own losses, by which sequences share a micro-batch: in float64, for every loss that it has."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

# isort: off
from examples.verl import verl_on_cpu  # noqa: F401  before verl
from examples.verl import megatron_on_cpu  # noqa: F401  before Megatron

# isort: on
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from foreroute.trainers.verl.settings import grouping_refusals
from tests.trainers.verl.verl_batches import nested, sequences, unpadded

COUNT = 12
GROUPINGS = ([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[11, 2, 7], [0, 5, 9, 3], [4, 1, 6, 8, 10]])
AGGREGATED = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
NORM = {"loss_agg_mode": "seq-mean-token-sum-norm"}
NORMALIZED = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
REFUSED = {
    "clip_cov": ({"loss_mode": "clip_cov"}, {}),
    "kl_cov": ({"loss_mode": "kl_cov"}, {}),
    "geo_mean": ({"loss_mode": "geo_mean"}, {}),
    "rollout_is_batch_normalize": ({"loss_mode": "bypass_mode", "rollout_correction": NORMALIZED}, {}),
    "loss_scale_factor": ({}, NORM),
}


def actor(loss, **settings):
    drawn = {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "dro_beta": 0.1}
    given = {"rollout_n": 4, "use_dynamic_bsz": True, "entropy_coeff": 0.01, "use_kl_loss": True} | settings
    return McoreActorConfig(policy_loss=PolicyLossConfig(**(drawn | loss)), **given)


def batch():
    """A mini-batch as verl's engines have it, of two data-parallel ranks."""
    pairs, rng = sequences(COUNT, seed=3), np.random.default_rng(0)
    made = {name: values for name, values in unpadded(pairs).items() if name != "routed_experts"}
    for name, sign in (("old_log_probs", -1), ("advantages", 1), ("ref_log_prob", -1)):
        made[name] = nested([sign * rng.random(len(response)) for _, response in pairs])
    td = TensorDict(made, batch_size=COUNT)
    tu.assign_non_tensor(td, dp_size=2, batch_num_tokens=97, global_batch_size=2 * COUNT)
    return td


def gradients(config, td, groups):
    """Gradients of all log-probs and entropies, as verl's Megatron engine adds up its micro-batches."""
    random = torch.Generator().manual_seed(1)
    torch.manual_seed(0)  # of what a loss draws
    log_probs, entropies = (
        [torch.rand(int(size), generator=random, dtype=torch.float64) for size in td["input_ids"].offsets().diff()]
        for _ in range(2)
    )
    leaves = [(-row).requires_grad_() for row in log_probs], [row.requires_grad_() for row in entropies]
    for group in groups:
        output = dict(zip(("log_probs", "entropy"), ([rows[s] for s in group] for rows in leaves), strict=True))
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in output.items()}
        loss, _ = ppo_loss(config, nested, tu.index_select_tensor_dict(td, group))
        (loss * len(groups) / len(groups)).backward()  # verl multiplies by their number, Megatron divides by it
    return torch.cat([row.grad for rows in leaves for row in rows])


def apart(config):
    found = [gradients(config, batch(), groups) for groups in GROUPINGS]
    assert found[0].abs().max() > 0
    return float((found[0] - found[1]).abs().max() / found[0].abs().max())


@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY.keys() - REFUSED.keys()))
def test_gradients_do_not_depend_on_which_sequences_share_a_micro_batch(mode):
    for settings in (*({"loss_agg_mode": each} for each in AGGREGATED), NORM | {"loss_scale_factor": 100}):
        config = actor({"loss_mode": mode}, **settings)
        assert apart(config) < 1e-12
        assert not [text for refused, text in grouping_refusals(config) if refused]


@pytest.mark.parametrize("named", REFUSED)
def test_losses_whose_gradients_do_are_refused_by_name(named):
    """The control: the gradient is another one."""
    loss, settings = REFUSED[named]
    config = actor(loss, **settings)
    assert apart(config) > 1e-3
    (text,) = [text for refused, text in grouping_refusals(config) if refused]
    assert named in text
