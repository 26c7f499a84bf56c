"""Choices of sparse-attention indexers: bytes in a file, and what replaying them does to a trainer.

Sizes: 2,048 of up to 8,192 positions, for the 61 layers of DeepSeek-V3.2, from one layer of synthetic scores: attention
sinks, a window, positions that matter to all queries, and noise that one query inherits from the one before. How much
real choices persist from query to query was not measured.

Mismatch: a tiny DeepSeek-V3.2 in bfloat16 as the engine, and the same weights in float32 as the trainer, with the
routes, the choices of indexers, both, or neither replayed: mean KL of the next token, over all positions.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.trace import file_of
from foreroute.adapters import hf
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import INDEXER, IndexerSpec, RoutedLayer, RoutingSpec, RoutingTrace

CONTEXT, TOP_K, LAYERS = 8192, 2048, 61
PERSISTENCE = {"persistent": 0.995, "loose": 0.9}
"""How much of its noise a query inherits."""
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_topk": 32,
    "index_head_dim": 32,
    "index_n_heads": 16,
}


def measured(*, quick: bool) -> dict[str, Any]:
    """Bytes per token and the mismatch, as metrics of `benchmarks.decisions`."""
    names = ["persistent"] if quick else list(PERSISTENCE)
    sizes = {name: indexer_bytes(PERSISTENCE[name]) for name in names}
    return {
        "indexer_bytes_per_token": sizes["persistent"]["all"],
        "indexer_bytes": sizes,
        "indexer_raw_bytes_per_token": 4 * TOP_K * LAYERS,
        "indexer_kl": mismatch(num_sequences=1 if quick else 4),
    }


def indexer_bytes(persistence: float) -> dict[str, float]:
    """Bytes per token and model, of all rows, and of those that see no more than they may choose."""
    spec = IndexerSpec(TOP_K, (RoutedLayer(0),))
    chosen = _chosen(np.random.default_rng(0), persistence)
    sizes = {}
    for name, length in (("all", CONTEXT), ("seen_whole", TOP_K)):
        counts = np.minimum(np.arange(length) + 1, TOP_K)
        ids = np.concatenate(chosen[:length]).astype(np.int32)
        trace = synthetic_trace(RoutingSpec(8, 1, (RoutedLayer(0),)), [length], seed=0, complete=True)
        with_choices = trace.with_stream(INDEXER, spec.stream(np.arange(length), [(counts, ids)]))
        taken = len(file_of(with_choices)) - len(file_of(trace))
        sizes[name] = LAYERS * taken / length
    return sizes


def _chosen(rng: np.random.Generator, persistence: float) -> list[NDArray[np.int64]]:
    """The positions that each query attends to, ascending."""
    lasting, noise = rng.standard_normal((2, CONTEXT)).astype(np.float32)
    fresh, chosen = np.float32((1 - persistence**2) ** 0.5), []
    for query in range(CONTEXT):
        noise = np.float32(persistence) * noise + fresh * rng.standard_normal(CONTEXT, np.float32)
        scores = np.float32(0.7) * lasting[: query + 1] + noise[: query + 1]
        scores[:4] += 5
        scores[max(0, query + 1 - TOP_K // 8) :] += 3
        if query < TOP_K:
            chosen.append(np.arange(query + 1))
        else:
            chosen.append(np.sort(np.argpartition(scores, -TOP_K)[-TOP_K:]))
    return chosen


def mismatch(*, num_sequences: int, length: int = 256) -> dict[str, float]:
    """Mean KL of engine to trainer under each replay."""
    trainer = hf.build_model("deepseek_v32", seed=0, **SIZES).eval()
    engine = copy.deepcopy(trainer).bfloat16()
    trainer.load_state_dict(engine.state_dict())  # the same weights: the arithmetic alone differs
    tokens = torch.randint(5, 512, (num_sequences, length), generator=torch.Generator().manual_seed(5))
    of_engine, of_trainer = hf.attach(engine), hf.attach(trainer)
    with torch.no_grad():
        with of_engine.record(indexers=True) as recording:
            expected = _log_probs(engine, tokens)
        both = recording.trace()
        alone = RoutingTrace.unrouted(both.spec, list(tokens.numpy())).with_stream(INDEXER, both.streams[INDEXER])
        replays: dict[str, AbstractContextManager[Any]] = {
            "neither": nullcontext(),
            "routes": of_trainer.replay(both.without_streams()),
            "indexers": of_trainer.replay(alone, missing="native"),
            "both": of_trainer.replay(both),
        }
        divergence = {}
        for name, replay in replays.items():
            with replay:
                seen = _log_probs(trainer, tokens)
            divergence[name] = float((expected.exp() * (expected - seen)).sum(-1).mean())
    return divergence


def _log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float().log_softmax(-1)
