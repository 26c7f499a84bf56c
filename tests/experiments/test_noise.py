"""Passes of one engine, and of a real vLLM: all of them compute the model, each in the way that its name says."""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from experiments import noise, served
from experiments.cells import Cell
from experiments.claimed import PASSES
from experiments.models import configuration, merged
from experiments.noise import ScoringEngine, batches_of, compared, passes, run_noise
from experiments.starts import loaded, started
from foreroute.core.caches import find_cache
from foreroute.testing.models import round_by_shape
from foreroute.train.loop import make_trainer
from tests.engines.small_policy import forward, require_routes, response_logprobs
from tests.train.small_runs import small_values

pytestmark = pytest.mark.slow
GROUP, TEMPERATURE = 4, 0.8
PYTHON = Path(os.environ.get("FOREROUTE_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
SIZES = {"head_dim": 32, "initializer_range": 0.3, "max_position_embeddings": 64}


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


def test_every_pass_is_cut_as_its_name_says(start):
    """By the tokens of each forward, and how many the cache held before it."""
    _, engine, generation = rolled_out(start, "float32")
    seen = []

    def watch(module, args, kwargs):
        cache = find_cache(kwargs.values())
        seen.append((*kwargs["input_ids"].shape, 0 if cache is None else cache.get_seq_length()))

    engine._model.register_forward_pre_hook(watch, with_kwargs=True)
    (batch,) = list(batches_of(generation, np.flatnonzero(generation.prompt_lengths == 8), 999))
    part = generation.select(batch)
    size, width = len(part), int(part.trace.lengths.max()) - 1
    everything = [np.arange(size)]
    engine.score(part, everything, TEMPERATURE)
    engine.score(part, everything, TEMPERATURE, chunk=5)
    engine.score(part, everything, TEMPERATURE, group=GROUP)
    assert seen[0] == (size, width, 0)
    chunks = [(size, min(5, width - at), at) for at in range(0, width, 5)]
    assert seen[1 : 1 + len(chunks)] == chunks
    assert seen[1 + len(chunks) :] == [(size // GROUP, 8, 0), (size, width - 8, 8)]


class RoundingEngine(ScoringEngine):
    """Passes of other shapes differ on any processor."""

    def __init__(self, *args):
        super().__init__(*args)
        round_by_shape(self._model)


def test_rounding_makes_passes_differ_and_repeating_does_not(start):
    cell = Cell("T", "noise", 3, "moe", {})
    longer = {"min_operands": 10, "max_operands": 11}
    with patch.object(noise, "ScoringEngine", RoundingEngine):
        found = run_noise(cell, small("bfloat16", **longer), start)
    assert (found["again"]["k3"], found["again"]["differing_share"]) == (0, 0)
    assert min(found[name]["k3"] for name in ("alone", "chunks", "prefix", "sampled")) > 0
    assert found["trainer"]["k3"] > found["trainer R3"]["k3"] > 0 == found["trainer R3"]["differing_share"]
    assert {each["response_tokens"] for each in found.values()} == {found["again"]["response_tokens"]}


@pytest.mark.exhaustive
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment: run `make vllm-env`")
def test_every_pass_of_vllm_computes_the_model(tmp_path):
    task = {"min_operands": 17, "max_operands": 17}
    values = merged(small_values(), {"model": {"sizes": SIZES}, "task": task, "rollout": {"temperature": 1.0}})
    config = configuration(values, {}, 3)
    task, policy = loaded(config, started(tmp_path, "served", values, 3))
    engine = ScoringEngine(policy.model, "float32")
    generation = make_trainer(config, task, policy, engine).roll_out().generation
    policy.model.eval()
    own, logprobs_R = forward(policy, generation.trace)[0], response_logprobs(policy, generation, 1.0)
    found = served.passes(policy, generation, PYTHON, dtype="float32")
    assert found.keys() == {name for _, asked in served.PASSES for name in asked}
    for name, each in found.items():
        np.testing.assert_allclose(each.logprobs_R, logprobs_R, atol=1e-3, err_msg=name)
        require_routes(each.trace, own)
