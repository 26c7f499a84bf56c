"""The model, the prompts and the reference of the tests with an engine."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from foreroute.adapters import hf
from foreroute.capture import Sampling
from foreroute.trace import concatenate

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
SIZES |= {"norm_topk_prob": True, "max_position_embeddings": 256, "tie_word_embeddings": False}
SIZES |= {"initializer_range": 0.3, "head_dim": 32}  # vLLM's attention on the CPU has no kernel for smaller heads
END = 3
SAMPLING = Sampling(max_new_tokens=30, end_token=END, temperature=0.8)
SAMPLED = replace(SAMPLING, max_new_tokens=5)
"""As answers were recorded."""


@cache
def policy(seed=0):
    return hf.attach(hf.build_model("qwen3_moe", seed=seed, **SIZES).eval())


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], n).astype(np.int32) for n in lengths]


def seeded(seed=1):
    return torch.Generator().manual_seed(seed)


def forward(routed, trace, temperature=SAMPLING.temperature):
    """Routes of the model itself on the trace's sequences, and the log-probs [T - 1] of each sequence's next tokens."""
    routes, logprobs = [], []
    for s in range(len(trace)):
        tokens = torch.from_numpy(trace.tokens(s))[None].long()
        with torch.no_grad(), routed.record() as recording:
            logits = routed.model(input_ids=tokens, use_cache=False).logits[0, :-1] / temperature
        routes.append(recording.trace())
        logprobs.append(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy())
    return concatenate(routes), logprobs


def response_logprobs(routed, generation, temperature=SAMPLING.temperature):
    """What the model itself says of the tokens behind the prompts."""
    _, logprobs = forward(routed, generation.trace, temperature)
    return np.concatenate([row[n - 1 :] for row, n in zip(logprobs, generation.prompt_lengths, strict=True)])


def require_routes(trace, own):
    """The sets are the model's own in all rows but the last of each sequence."""
    kept = np.delete(np.arange(own.num_rows), own.offsets[1:] - 1)
    assert np.array_equal(trace.token_ids_N, own.token_ids_N)
    assert np.array_equal(*(np.sort(each.expert_ids_NLK[kept], axis=-1) for each in (trace, own)))
