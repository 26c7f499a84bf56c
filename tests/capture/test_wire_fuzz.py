"""Seeded mutations of every text and byte wire: a typed refusal or a trace of the right shape, never anything else."""

import contextlib
import tracemalloc

import numpy as np
import pytest

from benchmarks.fuzzing.wires import expected, targets
from foreroute.errors import ForerouteError

CASES = 1500
TARGETS = {target.name: target for target in targets()}


def mutated(rng, data, low=0, high=None):
    """Between `low` and `high`: half the time one letter or digit for another, else up to three ruder changes."""
    out = bytearray(data)
    high = len(out) if high is None else high
    if rng.integers(0, 2):
        at = int(rng.integers(low, high))
        out[at] = int(rng.choice(list(b"0123456789" if chr(out[at]).isdigit() else b"ABCDEFGHIJKLMNOPabcdefghij+/")))
        return bytes(out)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(low, max(min(high, len(out)), low + 1)))
        match rng.integers(0, 5):
            case 0:
                out[at : at + 1] = bytes([rng.integers(0, 256)])
            case 1:
                del out[at : at + int(rng.integers(1, 5))]
            case 2:
                out[at:at] = bytes(rng.choice(list(b'0123456789[]{}",:=A/+-\x00\xff'), rng.integers(1, 9)))
            case 3:
                out[at:at] = out[at : at + int(rng.integers(1, 40))]
            case _:
                out = out[:at] if low == 0 else out
    return bytes(out)


@pytest.mark.parametrize("name", TARGETS)
def test_valid_samples_are_read(name):
    target = TARGETS[name]
    assert target.decode(target.make_valid(np.random.default_rng(0))).equals(expected())


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_are_refused_or_harmless(name):
    target, truth = TARGETS[name], expected()
    rng = np.random.default_rng(11)
    valid = target.make_valid(rng)
    refused = 0
    for _ in range(CASES):
        try:
            trace = target.decode(mutated(rng, valid))
        except ForerouteError:
            refused += 1
        else:
            assert trace.spec == truth.spec
            assert np.array_equal(trace.token_ids_N, truth.token_ids_N)
            assert np.array_equal(trace.valid_N, truth.valid_N)
    assert refused > CASES / 3


@pytest.mark.parametrize("name", [name for name, t in TARGETS.items() if t.redundant(t.make_valid(None))])
def test_what_the_wire_repeats_cannot_change_routes(name):
    target, truth = TARGETS[name], expected()
    rng = np.random.default_rng(12)
    valid = target.make_valid(rng)
    for start, stop in target.redundant(valid):
        for _ in range(CASES // 3):
            try:
                trace = target.decode(mutated(rng, valid, start, stop))
            except ForerouteError:
                continue
            assert trace.equals(truth)


def test_memory_stays_near_the_size_of_the_input():
    rng = np.random.default_rng(13)
    samples = [(t, mutated(rng, t.make_valid(rng))) for t in TARGETS.values() for _ in range(20)]
    tracemalloc.start()
    try:
        for target, data in samples:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(ForerouteError):
                target.decode(data)
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()
