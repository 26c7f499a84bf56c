"""Sampling masks of a real vLLM on the CPU, scored by the trainer's model. `masks_worker` names its stand-ins."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import foreroute
from foreroute.adapters import hf
from foreroute.capture import ModelFacts, decode
from foreroute.replay import masked_logprobs, masked_logprobs_of_logits
from foreroute.trace import SAMPLING, digest

WORKER = Path(__file__).with_name("masks_worker.py")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A tiny Qwen3-MoE whose logits have a standard deviation of 3, attached, and its checkpoint."""
    sizes = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64}
    model = hf.build_model("qwen3_moe", seed=0, initializer_range=0.5, **sizes, **heads).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(5, 69)[None]).logits
        model.lm_head.weight.mul_(3 / logits.std())
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    return hf.attach(model), folder


@pytest.fixture(scope="module")
def rollouts(policy, vllm_python, tmp_path_factory):
    """What vLLM sampled in float32, at top-p 0.8 and untruncated, as captured."""
    routed, folder = policy
    out = tmp_path_factory.mktemp("masks") / "rollouts.json"
    source = str(Path(foreroute.__file__).parents[1])
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [vllm_python, WORKER, folder, "float32", out]
    done = subprocess.run(
        command, env={**kept, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(out.read_text())
    return {top_p: captured(routed, *values.values()) for top_p, values in written.items()}


def captured(routed, rows, stated):
    requests = [
        SimpleNamespace(
            prompt_token_ids=row["prompt"],
            outputs=[
                SimpleNamespace(
                    token_ids=row["tokens"],
                    routed_experts=np.array(row["routes"], np.uint8),
                    sampling_mask=SimpleNamespace(token_ids=row["masks"]),
                )
            ],
        )
        for row in rows
    ]
    trace = decode(requests, model=ModelFacts(routed.spec, 3, 2048), engine="vllm")
    assert digest(trace) == stated  # vLLM's own objects were decoded to the same
    return trace, [torch.tensor(row["logprobs"]) for row in rows]


def log_ratios(routed, trace, logprobs, *, routes, masks):
    """Trainer over engine, for each sampled token."""
    model, ratios = routed.model, []
    for s, engine in enumerate(logprobs):
        own = trace.select([s])
        tokens = torch.from_numpy(own.tokens(0).astype(np.int64))
        inputs = {"input_ids": tokens[None], "output_hidden_states": True}
        with torch.no_grad():
            if routes:
                with routed.replay(own):
                    output = model(**inputs)
            else:
                output = model(**inputs)
        rows = np.flatnonzero(own.streams[SAMPLING].valid_N)
        sets, drawn = own.streams[SAMPLING].take(rows), tokens[rows + 1]
        if masks:
            scored = masked_logprobs_of_logits(output.logits[0, rows], drawn, sets)
            hidden = masked_logprobs(output.hidden_states[-1][0, rows], model.lm_head.weight.detach(), drawn, sets)
            assert torch.allclose(scored, hidden, atol=1e-4)
        else:
            scored = output.logits[0, rows].log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        ratios.append(scored - engine)
    return torch.cat(ratios).double()


def k3(log_ratio):
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def test_ratios_are_one_on_the_recorded_sets(policy, rollouts):
    """Without masks the mean ratio is the kept mass, routes replayed or not. Untruncated sampling needs none."""
    routed = policy[0]
    for routes in (False, True):
        without, on_sets = (log_ratios(routed, *rollouts["0.8"], routes=routes, masks=masks) for masks in (False, True))
        assert 0.78 < float(without.exp().mean()) < 0.83
        assert k3(without) > 1e-2
        assert float(on_sets.exp().mean()) == pytest.approx(1, abs=1e-4)
        assert k3(on_sets) < 1e-9
    whole = rollouts["1.0"][0].streams[SAMPLING]
    assert whole.valid_N.sum() == 16 * 16
    assert not len(whole.ids)
    assert k3(log_ratios(routed, *rollouts["1.0"], routes=True, masks=True)) < 1e-9
