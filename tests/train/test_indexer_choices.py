"""Choices of indexers in a run: recorded by the engine, replayed in recompute and update.

The oracle is what the indexers of the policy hand on to its attention.
"""

import sys
import warnings

import pytest

from foreroute.engines import vllm
from foreroute.train.chain import ChainTask
from foreroute.train.config import RolloutConfig
from foreroute.train.loop import make_schedule
from foreroute.train.policy import Alone, make_engine
from tests.attended import SIZES, attended, chosen, followed
from tests.tiers import grid
from tests.train.small_runs import always_informative, small_config, trainer_of


def config_of(**rl):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return small_config(
        model={"family": "deepseek_v32", "experts_implementation": "eager", "sizes": sizes},
        task={"min_operands": 4},
        rl={"routing": "R3", **rl},
    )


def step_of(monkeypatch, **rl):
    """A step; returns its rollout, what the first recompute executed, and what was attended to in it and the update."""
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    trainer, seen, executed = trainer_of(config_of(**rl)), {}, []

    def watched_update(*args, **options):
        with attended(trainer.policy.model) as seen["update"]:
            return update(*args, **options)

    def watched_recompute(*args):
        with attended(trainer.policy.model) as found:
            executed.append(recompute(*args))
        seen.setdefault("recompute", found)
        return executed[-1]

    recompute, update = trainer.recompute, trainer.update
    trainer.recompute, trainer.update = watched_recompute, watched_update
    experience, _ = trainer.run_step()
    return experience.generation.trace, executed[0].executed, seen


def test_recompute_and_update_attend_to_what_the_engine_did(monkeypatch):
    trace, _, seen = step_of(monkeypatch, routing="R3", mini_steps=2)
    for each in ("recompute", "update"):
        others, rows = followed(seen[each], chosen(trace))
        assert rows > 100
        assert others == 0, each


@pytest.mark.slow
def test_the_update_of_r2_attends_to_what_recompute_did(monkeypatch):
    trace, executed, seen = step_of(monkeypatch, routing="R2", mini_steps=2)
    assert "indexer" not in trace.streams
    others, rows = followed(seen["update"], chosen(executed))
    assert (others, rows > 100) == (0, True)


@pytest.mark.slow
def test_without_replay_the_trainer_attends_to_others(monkeypatch):
    """The control: in float32 it chooses otherwise than the engine in bfloat16."""
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    trainer = trainer_of(config_of())
    experience = trainer.roll_out()
    recompute, _ = make_schedule(experience, trainer.config.rl, Alone(), seed=(0, 0))
    with attended(trainer.policy.model) as seen:
        trainer.recompute(experience.generation, recompute, "native")
    others, rows = followed(seen, chosen(experience.generation.trace))
    assert others > 0.01 * rows


@grid("routing", ["R3", "R2"], quick=1)
def test_an_engine_that_returns_no_choices_is_warned_of(monkeypatch, routing):
    monkeypatch.setattr(vllm, "VLLMEngine", lambda *args, **settings: "an engine")
    config = config_of(routing=routing).model_copy(
        update={
            "rollout": RolloutConfig(engine="vllm", server={"python": sys.executable})
        }  # as read, not as checked together
    )
    policy = trainer_of(config_of()).policy
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert make_engine(config, policy) == "an engine"
    warned = [str(each.message) for each in seen]
    assert [("routes alone are replayed" in each) for each in warned] == ([True] if routing == "R3" else [])
