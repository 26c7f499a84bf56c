"""A release of vLLM as the engine of a trainer: each row and log-prob is the model's under its weights.

CI asks the release at hand for the first, and the night each release for all.
"""

import json
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from foreroute.adapters.checkpoint import ModelWriter, ServedModel
from foreroute.capture import decode
from foreroute.engines import vllm
from foreroute.replay import masked_logprobs_of_logits
from foreroute.trace import SAMPLING as SETS
from tests.engines.small_policy import SAMPLING, SIZES, forward, policy, prompts, response_logprobs, seeded
from tests.engines.vllm.conftest import with_stand_ins

pytestmark = pytest.mark.slow

START_S = 1200
OPTIONS = {"block_size": 32, "num_gpu_blocks_override": 20, "max_num_seqs": 8}
"""Twelve sequences do not fit into the cache."""


@pytest.fixture(scope="module")
def engine(vllm_python, tmp_path_factory):
    python = with_stand_ins(vllm_python, tmp_path_factory.mktemp("python"), masks=False)
    settings = vllm.ServerSettings(python=python, precision="float32", options=OPTIONS)
    with vllm.VLLMEngine(ServedModel.of(policy()), settings, timeout_s=START_S) as engine:
        yield engine


def differing(routed, trace):
    """Rows whose sets are not the model's."""
    own, rows = forward(routed, trace)[0], np.flatnonzero(trace.valid_N)
    is_other = np.sort(trace.expert_ids_NLK[rows]) != np.sort(own.expert_ids_NLK[rows])
    return {*rows[is_other.any(axis=(1, 2))].tolist()}


def test_groups_of_more_sequences_than_fit_are_the_models(engine):
    for version in (0, 1):
        engine.load_weights(policy(version).model.state_dict(), version)
        found = engine.generate(prompts(100, 70, 5), replace(SAMPLING, group_size=4, max_new_tokens=60), seeded())
        assert not differing(policy(version), found.trace)
        assert len(differing(policy(1 - version), found.trace)) > found.trace.valid_N.sum() / 2  # the control
        assert np.abs(response_logprobs(policy(version), found) - found.logprobs_R).max() < 1e-4


@pytest.mark.exhaustive
def test_weights_that_change_in_mid_request_have_the_rows_behind_the_change(engine, tmp_path):
    """A stream, whose last chunk has the routes; rows that were computed before keep those of the old weights."""
    engine.load_weights(policy(0).model.state_dict(), 0)
    new = ModelWriter(policy(1).model).write(tmp_path / "new")
    update = {
        "/pause?mode=keep": {},
        "/collective_rpc": {"method": "foreroute_load", "args": [str(new)]},
        "/update_weight_version": {"new_version": "1"},
        "/resume": {},
    }
    (prompt,), chunks = prompts(36), []
    sampling = {"max_tokens": 200, "temperature": 0.8, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": prompt.tolist(), "sampling_params": sampling, "stream": True}
    transport = httpx.HTTPTransport(uds=str(engine._process.socket))
    with (
        httpx.Client(transport=transport, base_url="http://vllm", timeout=START_S, trust_env=False) as client,
        client.stream("POST", vllm.GENERATE, json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks += json.loads(line.removeprefix("data: "))["choices"]
                for path, given in update.items() if len(chunks) == 2 else ():
                    client.post(path, json=given).raise_for_status()
    assert [number for number, chunk in enumerate(chunks) if chunk.get("routed_experts")] == [len(chunks) - 1]
    sampled = [token for chunk in chunks for token in chunk["token_ids"] or []]
    whole = chunks[-1] | {"token_ids": sampled, "prompt_token_ids": prompt.tolist()}
    trace = decode({"choices": [whole]}, model=policy().spec, vocabulary_size=SIZES["vocab_size"])
    of_new, of_old = (differing(policy(version), trace) for version in (0, 1))
    assert not of_new & of_old
    assert 35 < max(of_old) < min(of_new) <= trace.num_rows - 2, "the old weights have the first rows"


@pytest.mark.exhaustive
def test_masks_take_the_kept_mass_out_of_the_ratios(vllm_python, tmp_path, capsys):
    """Without them the mean ratio of trainer over engine is the kept mass: docs/replay.md has both."""
    python = with_stand_ins(vllm_python, tmp_path)
    settings = vllm.ServerSettings(python=python, precision="float32", options=OPTIONS, sampling_masks=True)
    with vllm.VLLMEngine(ServedModel.of(policy()), settings, timeout_s=START_S) as engine:
        engine.load_weights(policy().model.state_dict(), 0)
        cut = replace(SAMPLING, top_p=0.8, end_token=-1)
        found = engine.generate(prompts(*range(8, 24)), cut, seeded())
        assert not engine.generate(prompts(8), SAMPLING, seeded()).trace.streams
    on_sets = []
    for s in range(len(found)):
        trace = found.trace.select([s])
        tokens, rows = torch.from_numpy(trace.tokens(0)).long(), np.flatnonzero(trace.streams[SETS].valid_N)
        with torch.no_grad():
            logits = policy().model(input_ids=tokens[None]).logits[0, rows] / cut.temperature
        on_sets += masked_logprobs_of_logits(logits, tokens[rows + 1], trace.streams[SETS].take(rows)).tolist()
    means = [np.exp(scored - found.logprobs_R).mean() for scored in (response_logprobs(policy(), found), on_sets)]
    with capsys.disabled():
        sys.stdout.write(f"\nmean ratio {means[0]:.3f}, on the sets {means[1]:.3f}")
    assert 0.80 < means[0] < 0.86
    assert np.abs(np.exp(on_sets - found.logprobs_R) - 1).max() < 1e-4
