"""What a trace holds beside routes, in a run: choices of indexers are replayed, and tokens scored on sampling masks.

The oracles are what the indexers of the policy hand on to its attention, and the engine's own log-probs.
"""

import sys
import warnings
from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest

from foreroute.engines import vllm
from foreroute.train.config import RolloutConfig
from foreroute.train.loop import make_schedule
from foreroute.train.policy import Alone, make_engine
from tests.attended import SIZES, attended, chosen, followed
from tests.train.small_runs import small_config, trainer_of

pytestmark = pytest.mark.usefixtures("rewards_that_differ")


def sparse_config():
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return small_config(
        model={"family": "deepseek_v32", "experts_implementation": "eager", "sizes": sizes},
        task={"min_operands": 4},
        rl={"routing": "R3", "mini_steps": 2},
    )


def test_recompute_and_update_attend_to_what_the_engine_did():
    trainer, seen = trainer_of(sparse_config()), {}

    def watch(name, call):
        def watched(*args, **options):
            with attended(trainer.policy.model) as found:
                assert name == "recompute" or name not in seen  # which is run again without replay, to measure
                seen.setdefault(name, found)
                return call(*args, **options)

        setattr(trainer, name, watched)

    for each in ("recompute", "update"):
        watch(each, getattr(trainer, each))
    experience, _ = trainer.run_step()
    for each, found in seen.items():
        others, rows = followed(found, chosen(experience.generation.trace))
        assert rows > 100
        assert others == 0, each
    assert seen.keys() == {"recompute", "update"}


@pytest.mark.parametrize("routing", ["R3", "R2"])
def test_an_engine_that_returns_no_choices_is_warned_of_where_they_would_be_replayed(tmp_path, monkeypatch, routing):
    monkeypatch.setattr(vllm, "ServerProcess", lambda *_: MagicMock(socket=None, folder=tmp_path))
    rollout = RolloutConfig(engine="vllm", server={"python": sys.executable})  # as read, not as checked together
    config = sparse_config()
    config = config.model_copy(update={"rollout": rollout, "rl": config.rl.model_copy(update={"routing": routing})})
    with warnings.catch_warnings(record=True, action="always") as found:
        make_engine(config, trainer_of(sparse_config()).policy).close()
    assert ["vLLM returns none" in str(each.message) for each in found] == [True] * (routing == "R3")


def recomputed(trainer, experience):
    recompute, _ = make_schedule(experience, trainer.config.rl, Alone(), seed=(0, 0))
    return trainer.recompute(experience.generation, recompute, "replayed")


def test_ratios_are_one_on_the_recorded_sets_and_the_kept_mass_without():
    settings = {"prompts": 8, "precision": "float32", "temperature": 0.8, "top_p": 0.9, "top_k": 8, "min_p": 0.01}
    trainer = trainer_of(small_config(rollout=settings, rl={"routing": "R3"}))
    experience, record = trainer.run_step()
    assert record.grad_norm > 0
    assert all(side.k3 < 1e-9 for side in record.mismatch.values())
    trainer = trainer_of(trainer.config)
    experience = trainer.roll_out()
    generation, on_sets = experience.generation, recomputed(trainer, experience).logprobs_R
    log_r = on_sets - generation.logprobs_R.astype(np.float64)
    assert np.mean(np.expm1(log_r) - log_r) < 1e-9
    without = replace(generation, trace=generation.trace.without_streams())
    assert recomputed(trainer, replace(experience, generation=without)).logprobs_R.mean() < on_sets.mean() - 0.01
