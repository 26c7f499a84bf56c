"""vLLM's passes over given tokens against the model, with a real vLLM."""

import numpy as np
import pytest

from experiments.models import configuration, merged
from experiments.noise import ScoringEngine
from experiments.served import PASSES, passes
from experiments.starts import loaded, started
from foreroute.train.loop import make_trainer
from tests.engines.small_policy import forward, require_routes, response_logprobs
from tests.train.small_runs import small_values

SIZES = {"head_dim": 32, "initializer_range": 0.3, "max_position_embeddings": 64}


@pytest.mark.exhaustive
def test_every_pass_computes_the_model(tmp_path, vllm_python):
    task = {"min_operands": 17, "max_operands": 17}
    values = merged(small_values(), {"model": {"sizes": SIZES}, "task": task, "rollout": {"temperature": 1.0}})
    config = configuration(values, {}, 3)
    task, policy = loaded(config, started(tmp_path, "served", values, 3))
    engine = ScoringEngine(policy.model, "float32")
    generation = make_trainer(config, task, policy, engine).roll_out().generation
    policy.model.eval()
    own, logprobs_R = forward(policy, generation.trace)[0], response_logprobs(policy, generation, 1.0)
    found = passes(policy, generation, vllm_python, dtype="float32")
    assert found.keys() == {name for _, asked in PASSES for name in asked}
    for name, each in found.items():
        np.testing.assert_allclose(each.logprobs_R, logprobs_R, atol=1e-3, err_msg=name)
        require_routes(each.trace, own)
