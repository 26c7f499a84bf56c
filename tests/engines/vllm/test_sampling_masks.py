"""Sampling masks of a real vLLM on the CPU, scored by the trainer's model. `stand_ins` has what a CPU lacks."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling
from foreroute.engines import vllm
from foreroute.replay import masked_logprobs_of_logits
from foreroute.trace import SAMPLING
from tests.engines.vllm.conftest import with_stand_ins

VOCABULARY = 2048
CUT = Sampling(max_new_tokens=16, end_token=-1, top_p=0.8)


@pytest.fixture(scope="module")
def policy():
    """A tiny Qwen3-MoE whose logits have a standard deviation of 3, attached."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_experts": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64}
    model = hf.build_model(
        "qwen3_moe", seed=0, initializer_range=0.5, num_experts_per_tok=4, max_position_embeddings=64, **sizes, **heads
    ).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 69)[None]).logits
        model.lm_head.weight.mul_(3 / logits.std())
        for parameter in model.parameters():  # weights that bfloat16 has too, so that arithmetic alone differs
            parameter.copy_(parameter.bfloat16())
    return hf.attach(model)


def sampled(engine, sampling):
    """Of the same 16 prompts each time."""
    rows = [[5 + (7 * s * p) % (VOCABULARY - 5) for p in range(8 + s)] for s in range(16)]
    return engine.generate([np.array(row, np.int32) for row in rows], sampling, torch.Generator().manual_seed(1))


def log_ratios(routed, generation, *, masks):
    """Trainer over engine, of each sampled token, on the routes of the generation."""
    ratios = []
    for s in range(len(generation)):
        own = generation.select([s])
        tokens, rows = torch.from_numpy(own.trace.tokens(0).astype(np.int64)), np.flatnonzero(own.targets_N)
        with torch.no_grad(), routed.replay(own.trace, weight_version=3):
            logits = routed.model(input_ids=tokens[None]).logits[0, rows]
        if masks:
            scored = masked_logprobs_of_logits(logits, tokens[rows + 1], own.trace.streams[SAMPLING].take(rows))
        else:
            scored = logits.log_softmax(-1).gather(1, tokens[rows + 1, None])[:, 0]
        ratios.append(scored.double().numpy() - own.logprobs_R)
    return np.concatenate(ratios)


@pytest.mark.exhaustive
def test_ratios_are_one_on_the_recorded_sets(policy, vllm_python, tmp_path, capsys):
    """Without masks the mean ratio is the kept mass, which docs/replay.md has. Untruncated sampling needs none."""
    python, options = with_stand_ins(vllm_python, tmp_path), {"max_num_seqs": 16}
    settings = vllm.ServerSettings(python=python, precision="float32", sampling_masks=True, options=options)
    with vllm.VLLMEngine(ServedModel.of(policy), settings) as engine:
        engine.load_weights(policy.model.state_dict(), version=3)
        cut, whole = (sampled(engine, replace(CUT, **changes)) for changes in ({}, {"top_p": 1.0, "max_new_tokens": 4}))
    rows = np.flatnonzero(cut.trace.streams[SAMPLING].valid_N)
    assert rows.tolist() == (np.flatnonzero(cut.sampled_N) - 1).tolist()
    without, on_sets = (log_ratios(policy, cut, masks=masks) for masks in (False, True))
    with capsys.disabled():
        sys.stdout.write(f"\nmean ratio {np.exp(without).mean():.3f}, on the sets {np.exp(on_sets).mean():.3f}")
    assert 0.78 < np.exp(without).mean() < 0.83
    assert np.mean(np.expm1(without) - without) > 1e-2
    assert np.exp(on_sets).mean() == pytest.approx(1, abs=1e-4)
    assert np.mean(np.expm1(on_sets) - on_sets) < 1e-9
    assert not whole.trace.streams
    all_tokens = log_ratios(policy, whole, masks=False)
    assert np.mean(np.expm1(all_tokens) - all_tokens) < 1e-9
