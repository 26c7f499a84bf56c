"""Malformed inputs for everything that reads what others wrote: no crash, no hang, no memory, nothing accepted unseen.

A target is a decoder with a maker of valid inputs. Damaged inputs MUST be refused with a `ForerouteError` or give what
the valid input gives. Forged inputs, where a target has them, are damage with right checksums: they MUST be refused or
give a trace that could be true.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fuzz_targets_capture, fuzz_targets_plan
from benchmarks.mutations import damage, forge
from foreroute.balance.verify import check_structure
from foreroute.errors import ForerouteError
from foreroute.trace import CODECS, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load, synthetic_trace
from foreroute.trace.check import check_rows
from foreroute.trace.codec import CodecName
from foreroute.trace.writing import encode_trace

CASES, QUICK_CASES = 200_000, 8_000
MODELS = ((8, 2, 3), (128, 8, 2), (300, 2, 1), (5, 1, 1))
MOST_SECONDS, MOST_MEGABYTES = 1.0, 256.0


@dataclass(frozen=True)
class Target:
    """A decoder of bytes from outside.

    Attributes:
        name: of the decoder.
        make: a valid input.
        decode: what is tried; raises `ForerouteError` for what it refuses.
        same: whether two decoded values are equal.
        forge: a malformed input with right checksums, if the format has any.
        check: raises when a decoded forgery cannot be true.
    """

    name: str
    make: Callable[[np.random.Generator], bytes]
    decode: Callable[[bytes], Any]
    same: Callable[[Any, Any], bool]
    forge: Callable[[bytes, np.random.Generator], bytes] | None = None
    check: Callable[[Any], None] | None = None


@dataclass
class Tally:
    """What became of the inputs of one run."""

    cases: int = 0
    refused: int = 0
    same: int = 0
    plausible: int = 0
    slowest_s: float = 0.0
    grown_mb: float = 0.0
    failures: list[str] = field(default_factory=list)


def run(quick: bool) -> dict[str, Any]:
    """Try all targets in turn."""
    cases = QUICK_CASES if quick else CASES
    with tempfile.TemporaryDirectory() as folder:
        found = targets(Path(folder))
        tallies = {target.name: fuzz(target, cases // len(found) + 1, seed=1) for target in found}
    total = {
        "cases": sum(t.cases for t in tallies.values()),
        "refused": sum(t.refused for t in tallies.values()),
        "failures": [failure for t in tallies.values() for failure in t.failures],
        "slowest_s": max(t.slowest_s for t in tallies.values()),
        "grown_mb": max(t.grown_mb for t in tallies.values()),
    }
    return {"metrics": total, "baselines": {}, "targets": {name: vars(tally) for name, tally in tallies.items()}}


def targets(folder: Path) -> list[Target]:
    """Every decoder that is tried; rooms that read foreign input add theirs here."""
    return [*trace_targets(folder), *capture_targets(), plan_target(folder)]


def capture_targets() -> list[Target]:
    """Every wire. None has a checksum, so damage that is still a possible row is accepted; it must be possible."""

    def possible(decoded: RoutingTrace, expected: RoutingTrace) -> bool:
        check_rows(decoded.expert_ids_NLK, decoded.valid_N, decoded.offsets, decoded.spec)
        return decoded.num_rows == expected.num_rows

    return [
        Target(f"capture {wire.name}", wire.make_valid, wire.decode, possible)
        for wire in fuzz_targets_capture.targets()
    ]


def plan_target(folder: Path) -> Target:
    """The plan file reader."""
    return Target(
        name="plan file",
        make=fuzz_targets_plan.plan_bytes,
        decode=lambda raw: fuzz_targets_plan.load_bytes(raw, folder / "tried"),
        same=fuzz_targets_plan.same,
        forge=forge,
        check=check_structure,
    )


def fuzz(target: Target, cases: int, *, seed: int) -> Tally:
    """Give one target `cases` malformed inputs; what must not happen is listed in `failures` with its case number."""
    tally = Tally()
    valid, expected = b"", None
    started_mb = None
    for case in range(cases):
        rng = np.random.default_rng([seed, case])
        if case % 50 == 0:
            valid = target.make(rng)
            expected = target.decode(valid)
            started_mb = started_mb or _peak_mb()
        forged = target.forge is not None and case % 4 == 3
        raw = target.forge(valid, rng) if forged and target.forge else damage(valid, rng)
        start = time.perf_counter()
        try:
            _judge(target, raw, expected, forged, tally)
        except Exception as error:
            tally.failures.append(f"{target.name} case {case}: {type(error).__name__}: {error}"[:200])
        seconds = time.perf_counter() - start
        tally.cases += 1
        tally.slowest_s = max(tally.slowest_s, seconds)
        if seconds > MOST_SECONDS:
            tally.failures.append(f"{target.name} case {case}: took {seconds:.1f} s")
    tally.grown_mb = _peak_mb() - (started_mb or 0.0)
    if tally.grown_mb > MOST_MEGABYTES:
        tally.failures.append(f"{target.name}: memory grew by {tally.grown_mb:.0f} MB")
    return tally


def _judge(target: Target, raw: bytes, expected: Any, forged: bool, tally: Tally) -> None:
    try:
        decoded = target.decode(raw)
    except ForerouteError:
        tally.refused += 1
        return
    if target.same(decoded, expected):
        tally.same += 1
    elif forged and target.check:
        target.check(decoded)
        tally.plausible += 1
    else:
        raise AssertionError("accepted with other content than the original")


def trace_targets(folder: Path) -> Iterator[Target]:
    """The trace file reader, per codec."""
    for codec in CODECS:
        yield Target(
            name=f"trace file, {codec}",
            make=lambda rng, codec=codec: _trace_bytes(rng, codec),  # type: ignore[misc]
            decode=lambda raw: _load_bytes(raw, folder / "tried"),
            same=lambda a, b: a.equals(b) and a.provenance == b.provenance,
            forge=forge,
            check=lambda trace: check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, trace.spec),
        )


def _trace_bytes(rng: np.random.Generator, codec: CodecName) -> bytes:
    from safetensors.numpy import save

    num_experts, top_k, num_layers = MODELS[int(rng.integers(len(MODELS)))]
    spec = RoutingSpec(num_experts, top_k, tuple(RoutedLayer(i) for i in range(num_layers)), model="fuzz")
    seed = int(rng.integers(2**31))
    prompt = synthetic_trace(spec, [20], seed=seed, complete=True).select([0, 0])
    samples = prompt.continued_by(synthetic_trace(spec, rng.integers(0, 9, 2).tolist(), seed=seed, weight_version=3))
    trace = concatenate([samples, synthetic_trace(spec, rng.integers(0, 90, 2).tolist(), seed=seed)])
    metadata, tensors = encode_trace(trace, codec)
    raw: bytes = save(tensors, metadata=metadata)
    return raw


def _load_bytes(raw: bytes, path: Path) -> RoutingTrace:
    path.write_bytes(raw)
    return load(path)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
