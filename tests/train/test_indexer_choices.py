"""Choices of indexers in a run: recorded by the engine, replayed in recompute and update.

The oracle is what the indexers of the policy hand on to its attention.
"""

import sys

import pytest

from foreroute.engines import vllm
from foreroute.train.chain import ChainTask
from foreroute.train.config import RolloutConfig
from foreroute.train.policy import make_engine
from tests.attended import SIZES, attended, chosen, followed
from tests.train.small_runs import always_informative, small_config, trainer_of


def config_of(**rl):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return small_config(
        model={"family": "deepseek_v32", "experts_implementation": "eager", "sizes": sizes},
        task={"min_operands": 4},
        rl={"routing": "R3", **rl},
    )


def test_recompute_and_update_attend_to_what_the_engine_did(monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    trainer, seen = trainer_of(config_of(mini_steps=2)), {}

    def watched_update(*args, **options):
        with attended(trainer.policy.model) as seen["update"]:
            return update(*args, **options)

    def watched_recompute(*args):
        with attended(trainer.policy.model) as found:
            executed = recompute(*args)
        seen.setdefault("recompute", found)
        return executed

    recompute, update = trainer.recompute, trainer.update
    trainer.recompute, trainer.update = watched_recompute, watched_update
    experience, _ = trainer.run_step()
    for each in ("recompute", "update"):
        others, rows = followed(seen[each], chosen(experience.generation.trace))
        assert rows > 100
        assert others == 0, each


def test_an_engine_that_returns_no_choices_is_warned_of(monkeypatch):
    monkeypatch.setattr(vllm, "VLLMEngine", lambda *args, **settings: "an engine")
    config = config_of().model_copy(
        update={
            "rollout": RolloutConfig(engine="vllm", server={"python": sys.executable})
        }  # as read, not as checked together
    )
    policy = trainer_of(config_of()).policy
    with pytest.warns(UserWarning, match="routes alone are replayed"):
        assert make_engine(config, policy) == "an engine"
