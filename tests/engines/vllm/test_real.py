"""vLLM on the CPU against the Hugging Face forward on the same tokens. Experts are compared as sets.

One server is started for the whole file, because it takes minutes to load.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from foreroute.adapters.checkpoint import ModelWriter, ServedModel
from foreroute.engines import vllm
from tests.engines.small_policy import SAMPLING, policy, prompts, response_logprobs, seeded, set_match

pytestmark = pytest.mark.slow

TIGHT = {"block_size": 32, "num_gpu_blocks_override": 10, "max_num_seqs": 8, "distributed_executor_backend": "uni"}
"""Eight sequences do not fit into ten blocks. As for one GPU, the worker is in the engine's process."""
START_S = 560


@pytest.fixture(scope="module")
def real(vllm_python, tmp_path_factory):
    """The policy under versions 0 and 1 of its weights, and an engine in float32."""
    folder = tmp_path_factory.mktemp("server")
    weights = [policy(seed=0), policy(seed=1)]
    folders = [ModelWriter(w.model).write(folder / f"checkpoint-{n}") for n, w in enumerate(weights)]
    settings = vllm.ServerSettings(python=vllm_python, precision="float32", options=TIGHT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else vLLM gives the worker a process on a CPU
        with vllm.VLLMEngine(ServedModel.of(weights[0]), settings, timeout_s=START_S) as engine:
            yield SimpleNamespace(weights=weights, folders=folders, engine=engine)


def load(real, version):
    real.engine.load_weights(real.weights[version].model.state_dict(), version)
    return real.weights[version]


def counted(engine, name):
    """What vLLM counted since it started."""
    transport = httpx.HTTPTransport(uds=str(engine._process.socket))
    with httpx.Client(transport=transport, trust_env=False) as client:
        text = client.get("http://vllm/metrics").text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))


def largest_difference(routed, generation):
    return float(np.abs(response_logprobs(routed, generation) - generation.logprobs_R).max())


def test_groups_with_prefix_cache_and_preemption(real):
    routed, engine = load(real, 0), real.engine
    before = {name: counted(engine, name) for name in ("num_preemptions", "prefix_cache_hits")}
    sampling = replace(SAMPLING, group_size=4, max_new_tokens=50)
    found = [engine.generate(prompts(100, 70, 5), sampling, seeded()) for _ in range(2)]
    assert all(counted(engine, name) > count for name, count in before.items()), before
    for generation in found:
        assert len(generation) == 12
        assert set_match(routed, generation.trace) == 1.0
        assert largest_difference(routed, generation) < 1e-3
        assert generation.trace.versions == (0,)


def test_new_weights_leave_nothing_of_the_old_in_the_prefix_cache(real):
    """They go the way of a trainer that has a checkpoint and no model of transformers."""
    load(real, 0)
    real.engine.generate(prompts(100), replace(SAMPLING, group_size=2), seeded())
    real.engine.load_weights(load_file(real.folders[1] / "model.safetensors"), 1)
    hits = counted(real.engine, "prefix_cache_hits")
    generation = real.engine.generate(prompts(100), replace(SAMPLING, group_size=2, max_new_tokens=1), seeded())
    # the second of the group may hit what the first has just computed, no more
    assert counted(real.engine, "prefix_cache_hits") - hits <= 96
    assert generation.trace.versions == (1,)
    assert set_match(real.weights[1], generation.trace) == 1.0
    assert set_match(real.weights[0], generation.trace) < 0.5
    assert largest_difference(real.weights[1], generation) < 1e-3
