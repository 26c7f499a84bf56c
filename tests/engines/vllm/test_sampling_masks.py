"""Sampling masks of a real vLLM on the CPU, scored by the trainer's model. `stand_ins` has what a CPU lacks."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling
from foreroute.engines import vllm
from foreroute.replay import masked_logprobs, masked_logprobs_of_logits
from foreroute.trace import SAMPLING
from tests.engines.vllm.conftest import with_stand_ins

VOCABULARY = 2048
CUT = Sampling(max_new_tokens=16, end_token=-1, top_p=0.8)
WHOLE = replace(CUT, top_p=1.0)


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


def log_ratios(routed, generation, *, routes, masks):
    """Trainer over engine, of each sampled token, in float64 from dense logits. Our scores are held against them."""
    model, ratios = routed.model, []
    ends = np.cumsum(generation.response_lengths)
    for s in range(len(generation)):
        own = generation.select([s])
        tokens = torch.from_numpy(own.trace.tokens(0).astype(np.int64))
        rows = np.flatnonzero(own.targets_N)
        inputs = {"input_ids": tokens[None], "output_hidden_states": True}
        with torch.no_grad():
            if routes:
                with routed.replay(own.trace, weight_version=3):
                    output = model(**inputs)
            else:
                output = model(**inputs)
        logits = output.logits[0, rows].double()
        drawn = tokens[rows + 1]
        if masks:
            sets = own.trace.streams[SAMPLING].take(rows)
            for row, (first, end) in enumerate(zip(sets.offsets, sets.offsets[1:], strict=False)):
                kept = torch.zeros(VOCABULARY, dtype=torch.bool)
                kept[torch.from_numpy(sets.ids[first:end].astype(np.int64))] = True
                logits[row, ~kept] = -torch.inf
            scored = masked_logprobs_of_logits(output.logits[0, rows], drawn, sets)
            hidden = masked_logprobs(output.hidden_states[-1][0, rows], model.lm_head.weight.detach(), drawn, sets)
        expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        if masks:
            assert torch.allclose(scored.double(), expected, atol=1e-4)
            assert torch.allclose(hidden.double(), expected, atol=1e-4)
        ratios.append(expected.numpy() - generation.logprobs_R[ends[s] - len(rows) : ends[s]])
    return np.concatenate(ratios)


def measured(log_r, name, capsys):
    """Mean ratio and k3, which are printed too: docs/replay.md has them."""
    mean, k3 = float(np.exp(log_r).mean()), float(np.mean(np.expm1(log_r) - log_r))
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: mean ratio {mean:.4f}, k3 {k3:.1e}")
    return SimpleNamespace(mean=mean, k3=k3)


@pytest.mark.exhaustive
def test_ratios_are_one_on_the_recorded_sets(policy, vllm_python, tmp_path, capsys):
    """Without masks the mean ratio is the kept mass, routes replayed or not. Untruncated sampling needs none."""
    python, options = with_stand_ins(vllm_python, tmp_path), {"max_num_seqs": 16}
    settings = vllm.ServerSettings(python=python, precision="float32", sampling_masks=True, options=options)
    with vllm.VLLMEngine(ServedModel.of(policy), settings) as engine:
        engine.load_weights(policy.model.state_dict(), version=3)
        cut, short = sampled(engine, CUT), replace(WHOLE, max_new_tokens=4)
        whole, greedy = sampled(engine, short), sampled(engine, replace(short, temperature=0.0))
        kept_whole = sampled(engine, replace(short, top_k=VOCABULARY)).trace.streams[SAMPLING]
    rows = np.flatnonzero(cut.trace.streams[SAMPLING].valid_N)
    assert rows.tolist() == (np.flatnonzero(cut.sampled_N) - 1).tolist()
    for routes in (False, True):
        name = "float32, routes" if routes else "float32"
        without, on_sets = (log_ratios(policy, cut, routes=routes, masks=masks) for masks in (False, True))
        without, on_sets = measured(without, name, capsys), measured(on_sets, f"{name}, masks", capsys)
        assert 0.78 < without.mean < 0.83
        assert without.k3 > 1e-2
        assert on_sets.mean == pytest.approx(1, abs=1e-4)
        assert on_sets.k3 < 1e-9
    assert kept_whole.valid_N.sum() == 16 * 4
    assert not len(kept_whole.ids)
    assert not whole.trace.streams
    assert measured(log_ratios(policy, whole, routes=True, masks=False), "float32, all tokens", capsys).k3 < 1e-9
    # the most probable token, by the model itself
    tokens = torch.from_numpy(greedy.trace.tokens(0).astype(np.int64))
    with torch.no_grad():
        best = policy.model(input_ids=tokens[None]).logits[0, 7:-1].argmax(-1)
    assert torch.equal(best, tokens[8:])
    assert not greedy.logprobs_R.any()
