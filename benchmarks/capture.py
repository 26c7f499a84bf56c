"""Reading routes from engines, over what cannot be spared: one copy of them, and of text its base64.

Routes are drawn (128 experts, top-8, 48 layers, sequences of 2,048 tokens) and held as uint8, but for SGLang, which
sends int32. Times are processor time of one thread, in pairs; of two threads, seconds of the clock, the same sequences
in two calls, on threads over one after the other. Turns are captures of all tokens so far, which skip the known rows.
"""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.pairs import PairedRatio, compare
from foreroute.capture import decode
from foreroute.trace import NO_VERSION, RoutedLayer, RoutingSpec, RoutingTrace, extended

NUM_EXPERTS, TOP_K, NUM_LAYERS, LENGTH, SEQUENCES = 128, 8, 48, 2048, 64
SPEC = RoutingSpec(NUM_EXPERTS, TOP_K, tuple(map(RoutedLayer, range(NUM_LAYERS))))
PROMPT = 512
FEW_LAYERS = SPEC.select(SPEC.layers[:4])  # captures of turns take room for all rows so far
TURNS, TURN = (100, 400), 50
"""Numbers of turns that are joined, and the tokens of each."""


def run(quick: bool) -> dict[str, Any]:
    """Ratios with quartiles, and the milliseconds of what they are over."""
    pairs = 9 if quick else 41
    rng = np.random.default_rng(0)
    tokens, rows = [rng.integers(0, 150_000, LENGTH) for _ in range(SEQUENCES)], drawn_rows(rng)
    measure = partial(compare, pairs=pairs, clock=time.thread_time)
    packed = np.concatenate(rows)
    from_rows = partial(
        RoutingTrace.from_rows,
        SPEC,
        tokens,
        rows,
        valid=[np.arange(LENGTH) < LENGTH - 1] * SEQUENCES,
        weight_versions=[np.full(LENGTH, NO_VERSION)] * SEQUENCES,
    )
    read = partial(decode, model=SPEC)
    few = slice(SEQUENCES // 4)
    vllm, sglang = vllm_answers(tokens[few], rows[few]), sglang_answers(tokens[few], rows[few])
    halves = [(rows[part], tokens[part]) for part in (slice(SEQUENCES // 2), slice(SEQUENCES // 2, None))]
    with ThreadPoolExecutor(2) as pool:
        threads = compare(
            lambda: list(pool.map(lambda half: read(half[0], token_ids=half[1]), halves)),
            lambda: [read(given, token_ids=own) for given, own in halves],
            pairs=pairs,
        )
    few_turns, many_turns = (turns_of(rng, count) for count in TURNS)
    found = {
        "from_rows_over_copy": measure(from_rows, packed.copy),
        "decode_over_from_rows": measure(lambda: read(rows, token_ids=tokens), from_rows),
        "vllm_over_base64_and_copy": measure(lambda: read(vllm), base64_and_copy(vllm_texts(vllm))),
        "sglang_over_base64_and_copy": measure(lambda: read(sglang), base64_and_copy(sglang_texts(sglang))),
        "two_threads_over_one": threads,
        "fourfold_turns_joined_over_one": measure(lambda: extended(*many_turns), lambda: extended(*few_turns)),
    }
    return {
        "metrics": {name: shown(each) for name, each in found.items()},
        "baselines": {f"{name}_ms": round(each.baseline_ms, 3) for name, each in found.items()},
    }


def drawn_rows(rng: np.random.Generator) -> list[NDArray[np.uint8]]:
    """Draw uint8 [T - 1, L, K] for each sequence: picks of a few rows, with their experts renamed in each layer."""
    picks = np.argsort(rng.random((LENGTH - 1, NUM_EXPERTS)), axis=-1)[:, :TOP_K]
    rows = []
    for _ in range(SEQUENCES):
        names = np.stack([rng.permutation(NUM_EXPERTS) for _ in range(NUM_LAYERS)]).astype(np.uint8)
        order = np.stack([rng.permutation(LENGTH - 1) for _ in range(NUM_LAYERS)], axis=1)
        rows.append(names[np.arange(NUM_LAYERS)[:, None], picks[order]])
    return rows


def vllm_answers(tokens: list[NDArray[np.int64]], rows: list[NDArray[np.uint8]]) -> list[dict[str, Any]]:
    """Write responses of /inference/v1/generate, which hold a `.npy` file in base64."""
    answers = []
    for tokens_T, ids_RLK in zip(tokens, rows, strict=True):
        np.save(file := io.BytesIO(), ids_RLK)
        choice = {
            "token_ids": tokens_T[PROMPT:].tolist(),
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }
        answers.append({"prompt_token_ids": tokens_T[:PROMPT].tolist(), "choices": [choice]})
    return answers


def vllm_texts(answers: list[dict[str, Any]]) -> list[str]:
    """List the texts of their routes."""
    return [answer["choices"][0]["routed_experts"] for answer in answers]


def sglang_answers(tokens: list[NDArray[np.int64]], rows: list[NDArray[np.uint8]]) -> list[dict[str, Any]]:
    """Write responses of /generate, which hold int32 in base64."""
    return [
        {
            "prompt_token_ids": tokens_T[:PROMPT].tolist(),
            "output_ids": tokens_T[PROMPT:].tolist(),
            "meta_info": {"routed_experts": base64.b64encode(ids_RLK.astype("<i4").tobytes()).decode()},
        }
        for tokens_T, ids_RLK in zip(tokens, rows, strict=True)
    ]


def sglang_texts(answers: list[dict[str, Any]]) -> list[str]:
    """List the texts of their routes."""
    return [answer["meta_info"]["routed_experts"] for answer in answers]


def base64_and_copy(texts: list[str]) -> Callable[[], object]:
    """Return the floor of reading these texts."""
    return lambda: [np.frombuffer(binascii.a2b_base64(text), np.uint8).copy() for text in texts]


def turns_of(rng: np.random.Generator, count: int) -> list[RoutingTrace]:
    """Capture a conversation of so many turns."""
    tokens, ends = rng.integers(0, 150_000, count * TURN), range(0, (count + 1) * TURN, TURN)
    picks = np.argsort(rng.random((4096, NUM_EXPERTS)), axis=-1)[:, :TOP_K].astype(np.uint8)
    turns = []
    for first, stop in pairwise(ends):
        start = max(0, first - 1)  # the row of the last token so far comes with the next turn
        rows = picks[rng.integers(0, len(picks), (stop - 1 - start, FEW_LAYERS.num_layers))]
        turns.append(decode(rows, model=FEW_LAYERS, token_ids=tokens[:stop], start=start))
    return turns


def shown(found: PairedRatio) -> dict[str, float]:
    """The median ratio and its quartiles."""
    return {"ratio": round(found.ratio, 3), "low": round(found.low, 3), "high": round(found.high, 3)}
