"""Size and speed of trace files, beside zstd on the ids as they are, and the price of checking routes.

Routes are synthetic (128 experts, top-8, 48 layers, sequences of 1,000 tokens), correlated and uncorrelated along the
sequence. Times are processor time of one thread, medians of interleaved rounds. What is encoded and decoded is a whole
file in memory: its checks, tokens, tables and checksums are in the time and in the bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import zstandard

from benchmarks.harness.pairs import seconds_in_turn
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load
from foreroute.trace.checks import are_sets_of_eight, check_rows
from foreroute.trace.file import FORMAT, Encoding, encode

NUM_EXPERTS, TOP_K, NUM_LAYERS, LENGTH = 128, 8, 48, 1000
MADE_LAYERS = 8
GROUP = 8
"""Responses that share a prompt."""


def run(quick: bool) -> dict[str, Any]:
    """Bytes of correlated and uncorrelated routes and of shared prompts; times on the correlated routes."""
    sequences, copies, rounds = (48, 8, 5) if quick else (128, 8, 11)
    traces = {
        name: made_trace(sequences, correlation) for name, correlation in (("uncorrelated", 0.0), ("correlated", 0.7))
    }
    large = concatenate([relabelled(traces["correlated"], seed) for seed in range(copies)])
    measured, baselines = speeds(large, rounds)
    shared = {"shared_prompt_share": shared_prompt_share(traces["correlated"])}
    return {
        "metrics": {**{name: sizes(trace) for name, trace in traces.items()}, **shared, **measured},
        "baselines": baselines,
    }


def made_trace(sequences: int, correlation: float) -> RoutingTrace:
    """48 layers of routes, of which 8 are drawn and the others are those with their experts renamed."""
    spec = RoutingSpec(NUM_EXPERTS, TOP_K, tuple(RoutedLayer(i) for i in range(MADE_LAYERS)), model="synthetic")
    # drawing is slow; renamed experts are as good as drawn ones to a codec that looks at one layer
    few = synthetic_trace(spec, [LENGTH] * sequences, seed=1, correlation=correlation)
    ids = [relabelled(few, 100 + i).expert_ids_NLK for i in range(NUM_LAYERS // MADE_LAYERS)]
    layers = tuple(RoutedLayer(i) for i in range(NUM_LAYERS))
    return replace(few, spec=replace(spec, layers=layers), expert_ids_NLK=np.concatenate(ids, axis=1))


def relabelled(trace: RoutingTrace, seed: int) -> RoutingTrace:
    """Other tokens and other names of experts: the same statistics, and nothing that could be shared."""
    rng = np.random.default_rng(seed)
    names = np.stack([rng.permutation(trace.spec.num_experts) for _ in range(trace.spec.num_layers)])
    ids = names.astype(trace.spec.id_dtype)[np.arange(trace.spec.num_layers)[:, None], trace.expert_ids_NLK]
    # a trace holds 0 where it has no route
    ids[~trace.valid_N] = 0
    return replace(trace, expert_ids_NLK=ids, token_ids_N=rng.permutation(trace.token_ids_N))


def file_of(trace: RoutingTrace, encoding: Encoding = "sets") -> bytes:
    """The bytes that `save` writes."""
    return FORMAT.to_bytes(*encode(trace, encoding))


def sizes(trace: RoutingTrace) -> dict[str, float]:
    """Bytes per routed token and layer."""
    ids = np.ascontiguousarray(trace.expert_ids_NLK[trace.valid_N])
    cells = ids.shape[0] * trace.spec.num_layers
    return {
        "default_bytes": round(len(file_of(trace)) / cells, 3),
        "ordered_bytes": round(len(file_of(trace, "ordered")) / cells, 3),
        "int32_base64_bytes": round(trace.spec.top_k * 4 * 4 / 3, 3),
        "zstd_uint8_bytes": round(len(zstandard.ZstdCompressor(level=3).compress(ids.data)) / cells, 3),
        "any_set_bound_bytes": round(math.log2(math.comb(trace.spec.num_experts, trace.spec.top_k)) / 8, 3),
        "cells": float(cells),
    }


def shared_prompt_share(trace: RoutingTrace) -> float:
    """Bytes of groups of 8 responses that share a prompt as long as themselves, over those of as many without."""
    half = np.full(len(trace), LENGTH // 2)
    responses = trace.truncated(half)
    prompts = relabelled(trace, 7).truncated(half)
    groups = prompts.select(np.repeat(np.arange(len(trace) // GROUP), GROUP)).continued_by(responses)
    return round(len(file_of(groups)) / len(file_of(prompts.continued_by(responses))), 4)


class CountedBytes(BytesIO):
    """A file in memory that counts what is read of it, copied once, as from the system's cache of a file."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer)
        self.count += found
        return found


def speeds(trace: RoutingTrace, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times of files over those of zstd-3 on uint8, of a rank's share of 8 x 8, and of the check of routes."""
    spec, ids = trace.spec, np.ascontiguousarray(trace.expert_ids_NLK)
    content, quarter = file_of(trace), ids[: len(ids) // 4].tobytes()
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    frame, picks_NL = compressor.compress(quarter), ids.view(np.uint64)[..., 0]
    part: dict[str, Any] = {"sequences": np.arange(len(trace) // 8) + len(trace) // 8, "layers": spec.layers[6:12]}
    taken = seconds_in_turn(
        {
            "encode": lambda: encode(trace, "sets"),
            "decode": lambda: load(CountedBytes(content)),
            "part": lambda: load(CountedBytes(content), **part),
            "zstd encode": lambda: compressor.compress(quarter),
            "zstd decode": lambda: decompressor.decompress(frame),
            "check": lambda: check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec),
            "kernel": lambda: are_sets_of_eight(picks_NL, trace.valid_N, spec.num_experts),
        },
        rounds=rounds,
        clock=time.thread_time,
    )
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    read = CountedBytes(content)
    load(read, **part)
    as_speed = {name: len(quarter) / seconds[f"zstd {name}"] for name in ("encode", "decode")}
    return {
        "encode_over_zstd": round(ids.nbytes / seconds["encode"] / as_speed["encode"], 3),
        "decode_over_zstd": round(ids.nbytes / seconds["decode"] / as_speed["decode"], 3),
        "partial_read_share": round(seconds["part"] / seconds["decode"], 4),
        "partial_bytes_share": round(read.count / len(content), 4),
        "check_over_kernel": round(seconds["check"] / seconds["kernel"], 3),
        **{f"{name}_mbs": round(ids.nbytes / seconds[name] / 1e6) for name in ("encode", "decode", "check")},
        "megabytes": round(ids.nbytes / 1e6),
    }, {f"zstd_uint8_{name}_mbs": round(speed / 1e6) for name, speed in as_speed.items()}
