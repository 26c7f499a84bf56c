"""The methods inside the trainer: what a step learns from, what it leaves alone, and what it records."""

import numpy as np
import pytest
import torch

from foreroute.train.chain import ChainTask
from foreroute.train.config import METHODS
from foreroute.train.policy import ScheduledPass
from tests.tiers import grid
from tests.train.small_runs import SIZES, random_rewards, small_config, trainer_of

DISAGREEING = {"rollout": {"precision": "fp8"}}
ALL = ScheduledPass("recompute", 0, [np.arange(24)])


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch):
    """Those of an untrained model are all zero."""
    monkeypatch.setattr(ChainTask, "rewards", random_rewards())


def step(**sections):
    trainer = trainer_of(small_config(**sections))
    experience, record = trainer.run_step()
    return trainer, experience, record


def weights(trainer):
    return {name: value.clone() for name, value in trainer.policy.model.state_dict().items()}


@grid("method", METHODS, quick=1)
def test_neither_micro_steps_nor_their_order_change_what_is_learned(method, monkeypatch):
    seen, learned = [], []
    for tokens in (24, 4096):
        monkeypatch.setattr(ChainTask, "rewards", random_rewards())
        model = {"experts_implementation": "eager", "sizes": SIZES}  # grouped_mm knows no float64
        rl = {"method": method, "micro_step_tokens": tokens, "mini_steps": 2}
        trainer = trainer_of(small_config(rl=rl, model=model, rollout={"precision": "fp8", "prompts": 3}))
        trainer.policy.model.double()
        _, record = trainer.run_step()
        learned.append(weights(trainer))
        seen.append([record.loss, record.grad_norm, record.clip_share, *vars(record.importance).values()])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-6)
    assert seen[0][1] > 0
    for name, value in learned[0].items():
        torch.testing.assert_close(value, learned[1][name], rtol=1e-6, atol=1e-9)


def test_metrics_of_a_step_are_those_of_its_tokens():
    tis = {"correction": {"kind": "tis", "high": 1.005}, "routing": "none"}
    _, experience, record = step(rl=tis, **DISAGREEING)
    recomputed = trainer_of(small_config(rl=tis, **DISAGREEING)).recompute(experience.generation, ALL, "native")
    ratio = np.exp(recomputed.logprobs_R.astype(np.float64) - experience.generation.logprobs_R)
    seen = record.importance
    assert seen.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
    assert seen.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
    assert seen.effective_share == pytest.approx(ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(), rel=1e-5)
    assert seen.weight_mean == pytest.approx(np.minimum(ratio, 1.005).mean(), rel=1e-5)
    assert seen.cut_share == pytest.approx((ratio > 1.005).mean())
    assert 0 < seen.cut_share < 1


@grid(
    ("settings", "routers_move"),
    [
        ({"router": "frozen", "routing": "R3"}, False),
        ({"routing": "R3"}, True),
    ],
    quick=2,
)
def test_routers_stay_where_they_are_told_to(settings, routers_move):
    trainer = trainer_of(small_config(rl=settings))
    routers = {id(parameter) for parameter in trainer.policy.router_parameters()}
    assert len(routers) == 2
    names = {name for name, parameter in trainer.policy.model.named_parameters() if id(parameter) in routers}
    before = weights(trainer)
    trainer.run_step()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved - names, "nothing was learned"
    assert (moved & names == names) if routers_move else not moved & names


def test_all_ranks_are_dealt_from_one_list_of_prompts():
    """Each has its block of it, and samples for itself."""
    prompts = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        trainer = trainer_of(small_config(rollout={"prompts": 8}))
        trainer.execution.ranks.rank, trainer.execution.ranks.size = rank, size
        generation = trainer.roll_out().generation
        prompts.append([generation.trace.tokens(s)[:n].tolist() for s, n in enumerate(generation.prompt_lengths)])
    assert prompts[0] == prompts[1] + prompts[2]
    assert prompts[1] != prompts[2]
