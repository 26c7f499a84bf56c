"""Sampling masks: bytes in a file, and log-probabilities on the recorded sets. Indexers: `harness.indexers`.

Sizes. Sets of 3 and of 39 tokens of 151,936, drawn. `of_bound` is the bytes in a file over log2 C(V, n) bits for each
set of n, which says nothing of n; `of_json`, over the lists of an engine's answer. The figure `mask_bytes_over_bound`
is `of_bound` of sets of 39.

Log-probabilities, forward and backward, float32, sets of 512 tokens. The baseline computes what an unmasked loss needs,
a tile of rows at a time, and makes its logits again in the backward pass. Time is the processor's, from
interleaved pairs. Memory is what each takes at most above its inputs, from the resident size of a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import indexers
from benchmarks.harness.pairs import compare
from benchmarks.trace import file_of
from foreroute.replay import masked_logprobs
from foreroute.trace import SAMPLING, DecisionStream, RoutedLayer, RoutingSpec, RoutingTrace

VOCABULARY, WIDTH, SET, TILE = 151_936, 512, 512, 512
ROWS, QUICK_ROWS = 8192, 512


def run(*, quick: bool) -> dict[str, Any]:
    """Sizes, and ratios of time and memory."""
    sizes = {f"sets of {count}": _mask_bytes(count, 500 if quick else 4000) for count in (3, 39)}
    rows = QUICK_ROWS if quick else ROWS
    made = [_measured(name, rows) for name in ("masked", "tiled")]
    time_ratio = _timed(rows, pairs=2 if quick else 3)
    return {
        "metrics": {
            "mask_bytes": sizes,
            "mask_bytes_over_bound": sizes["sets of 39"]["of_bound"],
            "rows": rows,
            "masked_time_over_plain": time_ratio,
            "masked_memory_over_plain": made[0]["bytes"] / made[1]["bytes"],
            "masked_mib": made[0]["bytes"] / 2**20,
            **indexers.measured(quick=quick),
        },
        "baselines": {"tiled_mib": made[1]["bytes"] / 2**20},
    }


def _mask_bytes(count: int, rows: int) -> dict[str, float]:
    rng = np.random.default_rng(1)
    sets = [rng.choice(VOCABULARY, count, replace=False) for _ in range(rows)]
    masks = DecisionStream.from_sets(VOCABULARY, np.ones(rows, bool), np.full(rows, count), np.concatenate(sets))
    trace = _beside_routes(masks)
    taken = len(file_of(trace)) - len(file_of(trace.without_streams()))
    bound = rows * indexers.log2_sets(VOCABULARY, count) / 8
    written = sum(len(json.dumps(ids.tolist(), separators=(",", ":"))) + 1 for ids in sets)
    return {
        "bytes_per_token": taken / rows,
        "of_bound": taken / bound,
        "of_json": taken / written,
    }


def _beside_routes(masks: DecisionStream) -> RoutingTrace:
    spec = RoutingSpec(8, 1, (RoutedLayer(0),))
    rows = masks.num_rows
    trace = RoutingTrace.from_sequences(spec, [np.zeros(rows, int)], [np.zeros((rows, 1, 1), np.int64)])
    return trace.without_pick_order().with_stream(SAMPLING, masks)


def _problem(rows: int) -> tuple[Tensor, Tensor, Tensor, DecisionStream]:
    rng = np.random.default_rng(3)
    ids = np.concatenate([np.sort(rng.choice(VOCABULARY, SET, replace=False)) for _ in range(rows)])
    masks = DecisionStream.from_sets(VOCABULARY, np.ones(rows, bool), np.full(rows, SET), ids)
    torch.manual_seed(0)
    hidden, head = torch.randn(rows, WIDTH), torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5
    return hidden.requires_grad_(), head.requires_grad_(), torch.from_numpy(ids.reshape(rows, SET)[:, 7].copy()), masks


def _masked(hidden: Tensor, head: Tensor, targets: Tensor, masks: DecisionStream) -> None:
    torch.autograd.grad(masked_logprobs(hidden, head, targets, masks).sum(), (hidden, head))


def _tiled(hidden: Tensor, head: Tensor, targets: Tensor, masks: DecisionStream) -> None:
    def logprobs(hidden_RH: Tensor, targets_R: Tensor) -> Tensor:
        logits_RV = hidden_RH @ head.T
        return logits_RV.gather(1, targets_R[:, None])[:, 0] - logits_RV.logsumexp(-1)

    tiles = zip(hidden.split(TILE), targets.split(TILE), strict=True)
    parts = [checkpoint(logprobs, *tile, use_reentrant=False) for tile in tiles]
    torch.autograd.grad(torch.cat(parts).sum(), (hidden, head))


LOSSES = {"masked": _masked, "tiled": _tiled}


def _timed(rows: int, *, pairs: int) -> float:
    problem = _problem(rows)
    return compare(lambda: _masked(*problem), lambda: _tiled(*problem), pairs=pairs, clock=time.process_time).ratio


def _measured(name: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.decisions", name, str(rows)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    problem = _problem(int(sys.argv[2]))
    before = _peak()
    LOSSES[sys.argv[1]](*problem)
    print(json.dumps({"bytes": _peak() - before}))
