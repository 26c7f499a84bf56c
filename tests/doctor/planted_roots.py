"""Engines that pick one wrong expert in each sequence, or have a router that is wrong, beside trainers of any depth."""

import functools
from contextlib import nullcontext

import numpy as np
import torch

from foreroute.adapters import hf
from foreroute.capture import Generation
from foreroute.core import attach
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trace import RoutingTrace

EXPERTS, PICKS, VOCABULARY, SHAPE = 16, 4, 256, (8, 48)
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_experts_per_tok": PICKS, "max_position_embeddings": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True} | HEADS,
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 32} | HEADS,
}
"""By a softmax, and by logits."""
SPREAD = {"qwen3_moe": 0.1, "gpt_oss": 0.05}


@functools.cache
def trainer(family, depth):
    """A model with random weights of a spread at which flips follow flips."""
    sizes = COMMON | SIZES[family] | {"num_hidden_layers": depth}
    return hf.build_model(family, seed=0, initializer_range=SPREAD[family], **sizes).eval()


@torch.no_grad()
def rollout(model, precision, *, plant=False, noisy=None):
    """A pass of the engine over random text, and where in each sequence it was made to swap a pick: (position, layer).

    In the engine, the router of the layer `noisy` has noise of a tenth of its spread.
    """
    draw, (sequences, length) = torch.Generator().manual_seed(0), SHAPE
    tokens = torch.randint(0, VOCABULARY, SHAPE, generator=draw)
    engine = EmbeddedEngine(model, precision)._model
    if noisy is not None:
        router = engine.model.layers[noisy].mlp
        weight = (router.router if hasattr(router, "router") else router.gate).weight
        weight += (0.1 * torch.randn(weight.shape, generator=draw) * weight.float().std()).to(weight.dtype)
    routed, places = attach(engine), []

    def run(session):
        with routed.record() as recording, session:
            logits = engine(input_ids=tokens, use_cache=False).logits
        return logits.float().log_softmax(-1), recording.ids()[0].long()

    logprobs_BTV, ids_BTLK = run(nullcontext())
    if plant:
        forced = torch.full_like(ids_BTLK, -1)
        for b in range(sequences):
            t = int(torch.randint(length // 4, length - 8, (), generator=draw))
            layer = int(torch.randint(0, ids_BTLK.shape[2], (), generator=draw))
            row = ids_BTLK[b, t, layer].clone()
            others = [expert for expert in range(EXPERTS) if expert not in row.tolist()]
            row[0] = others[int(torch.randint(0, len(others), (), generator=draw))]
            forced[b, t, layer] = row
            places.append((t, layer))
        logprobs_BTV, ids_BTLK = run(routed.replay(forced))
    own = hf.attach(model)
    ids = [each[:-1].numpy().astype(own.spec.id_dtype) for each in ids_BTLK]
    scored = logprobs_BTV[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    trace = RoutingTrace.from_sequences(own.spec, list(tokens.numpy().astype(np.int32)), ids, weight_version=0)
    return Generation(trace, np.ones(sequences, np.int64), scored.flatten().numpy()), places
