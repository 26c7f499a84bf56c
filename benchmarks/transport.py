"""Routes from rollout workers to 64 training ranks through a store, beside a driver that loads and scatters them all.

About a million tokens in 48 layers, K = 8, E = 128, in sequences of 256 to 4,096 tokens, are written in 8 parts. They
are dealt to ranks by length, so that the sequences of a rank are no neighbours. A rank reads its rows of all layers; or
its share of the rows, one of 16, in the layers of its pipeline stage, one of 4. Two processes each read for 32 ranks in
turn. The driver reads one file and sends int16 tensors over gloo, exactly the rows of each rank, to two processes that
each receive for 32 ranks. Both do so from the files' bytes in the system's cache to checked arrays in the memory of
whoever trains. Bytes are those that the system's read calls return. Memory is that of a fresh process for each of a few
ranks, over what it held when foreroute was imported: compiled kernels and their library are in it, and said apart.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import foreroute as fr
from benchmarks.harness.pairs import compare
from benchmarks.trace import NUM_LAYERS, made_trace, relabelled
from foreroute.testing.ranks import Workers
from foreroute.trace import load_parts, save_part

RANKS, STAGES, PARTS, READERS = 64, 4, 8, 2
SHORTEST, LONGEST = 256, 4096
TOKENS = 1 << 20
LAYERS = tuple(fr.RoutedLayer(i) for i in range(NUM_LAYERS))
Share = list[int]


def run(quick: bool) -> dict[str, Any]:
    """Bytes, memory and seconds of 64 ranks that read their rows, and seconds of the driver."""
    pairs, fresh = (2, 1) if quick else (11, 8)
    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name) / "step", Path(name) / "whole"
        lengths, seconds = write(folder, whole)
        shares, stages = dealt(lengths, RANKS), dealt(lengths, RANKS // STAGES)
        one_copy = sum(path.stat().st_size for path in folder.iterdir())
        workers = Workers(1 + READERS, timeout_s=600)
        try:
            as_stages = [(share, stage) for share in stages for stage in range(STAGES)]
            read = [(share, None) for share in shares]
            before_mb = workers.run(warm_up, folder)[0]
            outcomes = {
                "": workers.run(read_shares, folder, read),
                "stage_": workers.run(read_shares, folder, as_stages),
            }
            assert all(workers.run(receives_the_same, folder, whole, shares[:4], lengths))
            timed = compare(
                lambda: workers.run(read_shares, folder, read),
                lambda: workers.run(scatter, whole, shares, lengths),
                pairs=pairs,
            )
            driver_mb = workers.run(most_held)[0] - before_mb
        finally:
            workers.close()
        memory = [fresh_rank(folder, share, stage) for share, stage in [*read[:fresh], *as_stages[:fresh]]]
    alone = [seconds_of for _, ranks in outcomes[""] for seconds_of in ranks]
    return {
        "metrics": {
            **{f"{kind}bytes_over_one_copy": bytes_over(one_copy, found) for kind, found in outcomes.items()},
            "rank_peak_mb": round(max(peak for peak, _ in memory), 1),
            "rank_peak_without_libraries_mb": round(max(peak - libraries for peak, libraries in memory), 1),
            "seconds_over_driver": timed.shown(),
            "slowest_rank_over_driver": round(max(alone) / timed.baseline_ms * 1000, 4),
            "rank_seconds": round(statistics.median(alone), 4),
            "seconds": round(timed.ratio * timed.baseline_ms / 1000, 3),
            "stored_over_one_file": round(one_copy / seconds.pop("whole_bytes"), 4),
            "bytes_per_token": round(one_copy / TOKENS, 2),
            "tokens": TOKENS,
            "sequences": len(lengths),
            **seconds,
        },
        "baselines": {"driver_seconds": round(timed.baseline_ms / 1000, 3), "driver_peak_mb": round(driver_mb)},
    }


def write(folder: Path, whole: Path) -> tuple[NDArray[np.int64], dict[str, float]]:
    """Write a step in parts and as one file; return the lengths of its sequences, and seconds of one thread."""
    rng, rows = np.random.default_rng(0), TOKENS // PARTS
    pool = made_trace(33, 0.7)
    parts: list[fr.RoutingTrace] = []
    while len(parts) < PARTS:
        copies = fr.concatenate([relabelled(pool, 10 * len(parts) + i) for i in range(4)])
        ends = np.cumsum(rng.integers(SHORTEST, LONGEST + 1, rows // SHORTEST))
        offsets = np.array([0, *ends[ends < rows - SHORTEST], rows])
        one = copies.take_rows(np.arange(rows), np.array([rows]))
        parts.append(replace(one, offsets=offsets))
    save_part(parts[0].select([0]), folder.with_name("warm"), 0, 1)
    begin = time.perf_counter()
    for i, part in enumerate(parts):
        save_part(part, folder, i, PARTS)
    middle = time.perf_counter()
    together = fr.concatenate(parts)
    after = time.perf_counter()
    fr.save(together, whole)
    seconds = {
        "write_seconds": round(middle - begin, 3),
        "write_over_one_file": round((middle - begin) / (time.perf_counter() - after), 3),
        "whole_bytes": float(whole.stat().st_size),
    }
    return together.lengths, seconds


def dealt(lengths: NDArray[np.int64], ranks: int) -> list[Share]:
    """Deal sequences, the longest first, each to the rank that has the fewest tokens."""
    tokens = np.zeros(ranks, np.int64)
    shares: list[Share] = [[] for _ in range(ranks)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        rank = int(tokens.argmin())
        tokens[rank] += lengths[sequence]
        shares[rank].append(sequence)
    return shares


def bytes_over(one_copy: int, outcomes: list[tuple[int, list[float]]]) -> float:
    """The bytes that all ranks read over those that are stored."""
    return round(sum(read for read, _ in outcomes) / one_copy, 4)


def layers_of(stage: int | None) -> tuple[fr.RoutedLayer, ...] | None:
    """The layers of a pipeline stage; all without one."""
    size = NUM_LAYERS // STAGES
    return None if stage is None else LAYERS[stage * size : (stage + 1) * size]


# what the processes do, of which the first is the driver


def warm_up(rank: int, folder: Path) -> float:
    """Load libraries and compiled kernels; return what is held then, MB."""
    load_parts(folder.with_name("warm"))
    return _count("status", "VmRSS") / 1e3


def most_held(rank: int) -> float:
    """Return the most memory that was held, MB."""
    return _count("status", "VmHWM") / 1e3


def read_shares(rank: int, folder: Path, asked: list[tuple[Share, int | None]]) -> tuple[int, list[float]]:
    """Read for every second rank; return the bytes that were read, and the seconds of each."""
    before, seconds = _count("io", "rchar"), []
    for share, stage in asked[rank - 1 :: READERS] if rank else []:
        begin = time.perf_counter()
        load_parts(folder, sequences=share, layers=layers_of(stage))
        seconds.append(time.perf_counter() - begin)
    return _count("io", "rchar") - before, seconds


def scatter(rank: int, whole: Path, shares: list[Share], lengths: NDArray[np.int64]) -> None:
    """Load all and send it, or receive for every second rank."""
    _received(rank, whole, shares, lengths, keep=False)


def receives_the_same(rank: int, folder: Path, whole: Path, shares: list[Share], lengths: NDArray[np.int64]) -> bool:
    """Say whether what the driver sends is what a rank reads."""
    received = _received(rank, whole, shares, lengths, keep=True)
    mine = shares[rank - 1 :: READERS] if rank else []
    read = [load_parts(folder, sequences=share) for share in mine]
    return all(np.array_equal(a.numpy(), b.expert_ids_NLK) for a, b in zip(received, read, strict=True))


def _received(rank: int, whole: Path, shares: list[Share], lengths: NDArray[np.int64], *, keep: bool) -> list[Any]:
    import torch
    from torch import distributed as dist

    kept: list[Any] = []
    if rank:
        for share in shares[rank - 1 :: READERS]:
            tensor = torch.empty((int(lengths[share].sum()), NUM_LAYERS, 8), dtype=torch.int16)
            dist.recv(tensor, 0)
            kept += [tensor] * keep
        return kept
    trace, sent = fr.load(whole), list[Any]()
    for i, share in enumerate(shares):
        tensor = torch.from_numpy(trace.select(share).expert_ids_NLK.astype(np.int16))
        sent.append((dist.isend(tensor, 1 + i % READERS), tensor))
        if len(sent) > READERS:  # the next is made while those before are on their way
            sent.pop(0)[0].wait()
    for request, _ in sent:
        request.wait()
    return kept


def _count(file: str, name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/self/{file}").read_text().splitlines())
    return int(lines[name].split()[0])


FRESH = """
import json, sys
import foreroute as fr
def held(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) / 1e3
folder, warm, share, layers = json.loads(sys.argv[1])
layers = layers and [fr.RoutedLayer(i) for i in layers]
before = held("VmRSS")
fr.trace.load_parts(warm)
libraries = held("VmRSS") - before
fr.trace.load_parts(folder, sequences=share, layers=layers)
print(json.dumps([held("VmHWM") - before, libraries]))
"""


def fresh_rank(folder: Path, share: Share, stage: int | None) -> tuple[float, float]:
    """Read for one rank in a process of its own; return its peak over what it held before, and libraries in it, MB."""
    layers = layers_of(stage)
    table = layers and [layer.index for layer in layers]
    asked = json.dumps([str(folder), str(folder.with_name("warm")), share, table])
    done = subprocess.run([sys.executable, "-c", FRESH, asked], capture_output=True, text=True, check=True)
    peak, libraries = json.loads(done.stdout)
    return peak, libraries
