"""How far live routes have moved from replayed ones, against what routers and experts were seen to be given."""

import numpy as np
import pytest

from foreroute.train.chain import ChainTask
from tests.tiers import grid
from tests.train.small_runs import always_informative, random_rewards, small_config, trainer_of


def watched_step(monkeypatch, config):
    """A step after the first; returns its record, and per forward of its update: rows, differing (row, layer)."""
    monkeypatch.setattr(ChainTask, "rewards", random_rewards())
    trainer = trainer_of(config)
    trainer.run_step()
    own, executed, taken = [], [], []

    def router_seen(router, args):
        hidden = args[0].detach().reshape(-1, router.weight.shape[1])
        own.append((hidden @ router.weight.detach().T).topk(router.top_k).indices.sort(-1).values)

    def experts_seen(_, args):
        executed.append(args[1].sort(-1).values)

    def watched(experience, mini_batches, *rest, **options):
        handles, routed = [], trainer.policy
        for path in routed.router_paths:
            router, experts = (routed.model.get_submodule(path.removesuffix("gate") + n) for n in ("gate", "experts"))
            handles.append(router.register_forward_pre_hook(router_seen))
            handles.append(experts.register_forward_pre_hook(experts_seen))
        taken.extend(mini_batches)
        result = update(experience, mini_batches, *rest, **options)
        for handle in handles:
            handle.remove()
        return result

    update, trainer.update = trainer.update, watched
    experience, record = trainer.run_step()
    num_layers = len(trainer.policy.router_paths)
    differing = [int((a != b).any(-1).sum()) for a, b in zip(own, executed, strict=True)]
    rows = [[int((experience.generation.trace.lengths[part] - 1).sum()) for part in each.micro_steps] for each in taken]
    return record, rows, np.array(differing).reshape(-1, num_layers).sum(axis=1), num_layers


@grid("routing", ["R2", "R3"], quick=1)
def test_live_agreement_is_of_the_routers_inputs_in_the_update(monkeypatch, routing):
    config = small_config(
        rl={"routing": routing, "mini_steps": 3, "learning_rate": 0.02, "warmup_steps": 0},
        rollout={"prompts": 8, "precision": "fp8"},
    )
    record, rows, differing, num_layers = watched_step(monkeypatch, config)
    forwards = iter(differing)
    expected = [1 - sum(next(forwards) for _ in each) / (sum(each) * num_layers) for each in rows]
    assert record["live_agreement"] == pytest.approx(expected)
    assert len(expected) == 3
    assert expected[2] < expected[0]
    # the routes of R2 are of the weights that its first mini-batch still has
    assert (expected[0] == 1) == (routing == "R2")


def test_nothing_is_watched_where_nothing_is_replayed(monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    assert "live_agreement" not in trainer_of(small_config(rl={"routing": "none"})).run_step()[1]
    trainer = trainer_of(small_config(measure={"compare_every": 2}))
    assert "live_agreement" in trainer.run_step()[1]
    assert "live_agreement" not in trainer.run_step()[1]
