"""Choices of sparse-attention indexers: their bytes, and what replaying them costs and does to a trainer.

Coded: 2,048 of the positions up to each of some in a window of 32,768, drawn anew for each, uniformly or by the inverse
of their age, as they travel to a device and as a file has them. The bound is log2 C(V, 2048) bits, V being those up to
there. `encode_ns` and `read_ns` are the processor's time for a choice, on the host and by torch on the CPU.

Step: forward and backward of a DeepSeek-V3.2 of two layers, 128 of up to 1,024 positions, its own choices and routes
replayed over neither, and over routes alone. Time is that of one thread.

Files: 2,048 of up to 8,192 positions, for the 61 layers of DeepSeek-V3.2, from one layer of synthetic scores: attention
sinks, a window, positions that matter to all queries, and noise that one query inherits from the one before. How much
real choices persist from query to query was not measured.

Mismatch: a tiny DeepSeek-V3.2 in bfloat16 as the engine, and the same weights in float32 as the trainer, with the
routes, the choices of indexers, both, or neither replayed: mean KL of the next token, over all positions.
"""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager, nullcontext
from math import lgamma, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.pairs import compare, near_one
from benchmarks.trace import file_of
from foreroute.adapters import hf
from foreroute.replay.coded_sets import CodedChoices
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import INDEXER, DecisionStream, IndexerSpec, RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trace.streams import MOST_CHOICES

WINDOW, CONTEXT, TOP_K, LAYERS = 32_768, 8192, 2048, 61
DRAWS = {"uniform": False, "recent": True}
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

STEP_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 128,
    "index_head_dim": 64,
}


def measured(*, quick: bool) -> dict[str, Any]:
    """Bytes per token and the mismatch, as metrics of `benchmarks.decisions`."""
    names = ["persistent"] if quick else list(PERSISTENCE)
    sizes = {name: indexer_bytes(PERSISTENCE[name]) for name in names}
    return {
        "indexer_bytes_per_token": sizes["persistent"]["all"],
        "indexer_bytes": sizes,
        "indexer_raw_bytes_per_token": 4 * TOP_K * LAYERS,
        "indexer_coded": {name: coded(is_recent, 32 if quick else 512) for name, is_recent in DRAWS.items()},
        **steps(pairs=2 if quick else 60),
        "indexer_kl": mismatch(num_sequences=1 if quick else 4),
    }


def coded(is_recent: bool, rows: int) -> dict[str, float]:
    """Bytes of a choice set and their ratio to the bound, on the wire and in a file, and times."""
    rng, position_N = np.random.default_rng(0), np.linspace(TOP_K, WINDOW - 1, rows).astype(np.int64)
    ids = [_drawn(rng, position + 1, is_recent) for position in position_N.tolist()]
    spec = IndexerSpec(TOP_K, (RoutedLayer(0),))
    stream = DecisionStream.from_sets(
        MOST_CHOICES, np.ones(rows, np.bool_), np.full(rows, TOP_K), np.concatenate(ids), layers=spec.layers
    )
    bound = sum(log2_sets(position + 1, TOP_K) for position in position_N.tolist()) / 8
    choices, begun = CodedChoices(spec, stream, position_N), time.thread_time()
    wire = len(choices.encoded(0))
    encoded = time.thread_time()
    choices.units_SK(0, torch.from_numpy(choices.start_S), torch.from_numpy(choices.low_S))
    read = time.thread_time()
    last = CodedChoices(spec, stream.take(np.array([rows - 1])), position_N[-1:])
    trace = synthetic_trace(RoutingSpec(8, 1, (RoutedLayer(0),)), [rows], seed=0, complete=True)
    file = len(file_of(trace.with_stream(INDEXER, stream))) - len(file_of(trace))
    return {
        "bound": bound / rows,
        "wire": wire / rows,
        "wire_over_bound": wire / bound,
        "wire_at_window": len(last.encoded(0)),
        "file": file / rows,
        "file_over_bound": file / bound,
        "encode_ns": (encoded - begun) * 1e9 / len(stream.ids),
        "read_ns": (read - encoded) * 1e9 / len(stream.ids),
    }


def _drawn(rng: np.random.Generator, visible: int, is_recent: bool) -> NDArray[np.int64]:
    """TOP_K of the visible positions, without return: the least of exponential clocks."""
    rates = 1 / np.arange(visible, 0, -1) if is_recent else 1.0
    return np.argpartition(rng.exponential(size=visible) / rates, TOP_K - 1)[:TOP_K]


def log2_sets(of: int, count: int) -> float:
    """log2 C(of, count)."""
    return (lgamma(of + 1) - lgamma(count + 1) - lgamma(of - count + 1)) / log(2)


def steps(*, pairs: int) -> dict[str, Any]:
    """Time of steps with choices replayed, over native ones and over steps with routes alone."""
    model = hf.build_model("deepseek_v32", seed=0, **SIZES | STEP_SIZES)
    tokens = torch.randint(
        5, 512, (1, STEP_SIZES["max_position_embeddings"]), generator=torch.Generator().manual_seed(5)
    )
    routed = hf.attach(model)
    with routed.record(indexers=True) as recording, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    trace = recording.trace()
    rows, routes = routed.rows(trace), routed.rows(trace.without_streams())

    def step(replay: AbstractContextManager[Any]) -> None:
        model.zero_grad()
        with replay:
            model(input_ids=tokens, use_cache=False).logits.square().mean().backward()

    def replayed() -> None:
        step(routed.replay(rows))

    over = {"native": lambda: step(nullcontext()), "routes": lambda: step(routed.replay(routes))}
    found: dict[str, Any] = {}
    for name, baseline in over.items():
        ratio = compare(replayed, baseline, pairs=pairs, clock=time.thread_time)
        found |= near_one(f"indexer_step_over_{name}", ratio)
    return found


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
