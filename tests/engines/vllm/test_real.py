"""vLLM on the CPU against the Hugging Face forward on the same tokens. Experts are compared as sets.

Two engines start at once, because each takes a while to load.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

from foreroute.adapters.checkpoint import ModelWriter, ServedModel
from foreroute.engines import vllm
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.train import parse_config
from foreroute.train.loop import make_trainer
from foreroute.train.policy import ScheduledPass
from foreroute.train.prompts import make_task
from tests.engines.small_policy import SAMPLING, forward, policy, prompts, seeded, set_match
from tests.engines.vllm.serving import served, wait_for

pytestmark = pytest.mark.slow

TIGHT = {"block_size": 32, "num_gpu_blocks_override": 10, "max_num_batched_tokens": 48, "max_num_seqs": 8}
"""Prompts longer than 48 are prefilled in chunks, and eight sequences do not fit into ten blocks."""


@pytest.fixture(scope="module")
def real(vllm_python, tmp_path_factory):
    """The policy under versions 0 and 1 of its weights, an engine in float32, and a server."""
    folder = tmp_path_factory.mktemp("server")
    weights = [policy(seed=0), policy(seed=1)]
    with ExitStack() as stack:
        folders = [ModelWriter(w.model).write(folder / f"checkpoint-{n}") for n, w in enumerate(weights)]
        url, process = stack.enter_context(served(vllm_python, folders[0], folder))
        settings = vllm.ProcessSettings(python=vllm_python, precision="float32", options=TIGHT)
        full = stack.enter_context(vllm.ProcessEngine(ServedModel.of(weights[0]), settings))

        def server():
            wait_for(url, process, folder)
            return vllm.VLLMServerEngine(
                ServedModel.at(folders[0]), url, weights_folder=folder / "weights", timeout_s=60
            )

        yield SimpleNamespace(weights=weights, folders=folders, full=full, server=server)


def load(engine, real, version):
    engine.load_weights(real.weights[version].model.state_dict(), version)
    return real.weights[version]


def largest_difference(routed, generation):
    """Between the engine's log-probs and those of the model."""
    _, expected = forward(routed, generation.trace)
    parts = [row[n - 1 :] for row, n in zip(expected, generation.prompt_lengths, strict=True)]
    return float(np.abs(np.concatenate(parts) - generation.logprobs_R).max())


def test_groups_with_prefix_cache_chunked_prefill_and_preemption(real):
    routed = load(real.full, real, 0)
    before = real.full.counters()
    asked = prompts(100, 70, 5)
    first = real.full.generate(asked, replace(SAMPLING, group_size=4, max_new_tokens=100), seeded())
    again = real.full.generate(asked, replace(SAMPLING, group_size=4, max_new_tokens=100), seeded())
    after = real.full.counters()
    assert after["preemptions"] > before["preemptions"]
    assert after["prefix_cache_hits"] > before["prefix_cache_hits"]
    for generation in (first, again):
        assert len(generation) == 12
        assert set_match(routed, generation.trace) == 1.0
        assert largest_difference(routed, generation) < 1e-3
        assert generation.trace.versions == (0,)


def test_new_weights_leave_nothing_of_the_old_in_the_prefix_cache(real):
    load(real.full, real, 0)
    asked = prompts(100)
    real.full.generate(asked, replace(SAMPLING, group_size=2), seeded())
    routed = load(real.full, real, 1)
    hits = real.full.counters()["prefix_cache_hits"]
    generation = real.full.generate(asked, replace(SAMPLING, group_size=2, max_new_tokens=1), seeded())
    # the second of the group may hit what the first has just computed, no more
    assert real.full.counters()["prefix_cache_hits"] - hits <= 96
    assert generation.trace.versions == (1,)
    assert set_match(routed, generation.trace) == 1.0
    assert set_match(real.weights[0], generation.trace) < 0.5
    assert largest_difference(routed, generation) < 1e-3


def test_abort_and_resume_under_new_weights(real):
    old = load(real.full, real, 0)
    asked = prompts(40, 20)
    partial = real.full.generate_until(asked, replace(SAMPLING, group_size=2), seeded(), engine_steps=9)
    assert not partial.finished_S.all()
    assert set_match(old, partial.trace) == 1.0

    new = load(real.full, real, 1)
    done = real.full.resume(partial, SAMPLING, seeded())
    assert done.finished_S.all()
    own = forward(new, done.trace)[0]
    for s in np.flatnonzero(~partial.finished_S):
        before, whole = partial.trace.select([s]), done.trace.select([s])
        kept = before.num_rows - 1
        assert whole.truncated([kept]).equals(before.truncated([kept]))
        assert [version for version, _ in groupby(whole.weight_versions_N.tolist())] == [0, 1, -1]
        # the cache of the prefix was filled again, so what follows is routed as the new model does
        later = slice(kept, whole.num_rows - 1)
        assert np.array_equal(np.sort(whole.expert_ids_NLK[later]), np.sort(own.select([s]).expert_ids_NLK[later]))


def test_the_server_serves_the_same_routes_and_takes_new_weights(real):
    """Weights go the way of a trainer that has a checkpoint and no model of transformers."""
    engine = real.server()
    for version in (0, 1):
        routed = real.weights[version]
        engine.load_weights(load_file(real.folders[version] / "model.safetensors"), version)
        for _ in range(2):
            generation = engine.generate(prompts(70, 5), replace(SAMPLING, group_size=2), seeded())
            assert set_match(routed, generation.trace) == 1.0
            assert largest_difference(routed, generation) < 1e-3
            assert generation.trace.versions == (version,)


@pytest.mark.exhaustive
def test_replay_takes_the_mismatch_of_bfloat16_away(vllm_python, capsys):
    routed, settings = policy(seed=0), vllm.ProcessSettings(python=vllm_python, precision="bfloat16")
    with vllm.ProcessEngine(ServedModel.of(routed), settings) as engine:
        engine.load_weights(routed.model.state_dict(), 0)
        generation = engine.generate(prompts(*[20] * 16), replace(SAMPLING, group_size=8), seeded())
    config = parse_config({"name": "vllm", "rollout": {"temperature": SAMPLING.temperature}}, source="test")
    trainer, figures = make_trainer(config, make_task(config), routed, engine), {}
    for replay in (False, True):
        everything = ScheduledPass("recompute", 0, [np.arange(len(generation))])
        passed = trainer.recompute(generation, everything, "replayed" if replay else "native")
        tokens = token_mismatch(passed.logprobs_R, generation.logprobs_R)
        routes = routing_mismatch(generation.trace, passed.executed)
        figures[replay] = (tokens.k3, tokens.f(2.0), routes.differing_share)
    with capsys.disabled():
        for replay, (k3, f2, differing) in figures.items():
            side = "with replay   " if replay else "without replay"
            sys.stdout.write(
                f"\nbfloat16 vLLM {side}: k3 {k3:.2e}, F(2) {f2:.2%}, differing (token, layer) {differing:.2%}"
            )
    (k3, f2, differing), (k3_replayed, f2_replayed, differing_replayed) = figures[False], figures[True]
    assert differing > 0.005
    assert differing_replayed == 0
    assert k3_replayed * 2 <= k3
    assert f2_replayed <= f2
