"""Passes of one engine, and of a real vLLM: all of them compute the model, each in the way that its name says."""

import numpy as np
import pytest

from experiments.claimed import PASSES
from experiments.models import configuration, merged
from experiments.noise import ScoringEngine, compared, passes
from experiments.starts import loaded, started
from foreroute.train.loop import make_trainer
from tests.engines.small_policy import forward, require_routes, response_logprobs
from tests.train.small_runs import small_values

pytestmark = pytest.mark.slow
GROUP, TEMPERATURE = 4, 0.8


def small(precision, **task):
    rollout = {"precision": precision, "group_size": GROUP, "temperature": TEMPERATURE, "prompts": 12}
    return merged(small_values(), {"rollout": rollout, "task": task})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return started(tmp_path_factory.mktemp("starts"), "moe", small("float32"), 3)


def rolled_out(start, precision):
    """The model that stands at the start, an engine of it, and a rollout of prompts of several lengths."""
    config = configuration(small(precision), {}, 3)
    task, policy = loaded(config, start)
    engine = ScoringEngine(policy.model, precision)
    generation = make_trainer(config, task, policy, engine).roll_out().generation
    assert len(np.unique(generation.prompt_lengths)) > 1
    assert len(np.unique(generation.response_lengths)) > 1
    return policy, engine, generation


def test_every_pass_computes_the_model(start):
    policy, engine, generation = rolled_out(start, "float32")
    policy.model.eval()
    own, _ = forward(policy, generation.trace)
    whole, others = passes(engine, generation, GROUP, TEMPERATURE, seed=0)
    assert list(others) == list(PASSES)
    for found in (whole, *others.values()):
        np.testing.assert_allclose(found.logprobs_R, response_logprobs(policy, generation, TEMPERATURE), atol=2e-5)
        require_routes(found.trace, own)
        assert compared(found, whole)[0].k3 < 1e-9
