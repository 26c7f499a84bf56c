"""Malformed inputs for every reader of what others wrote: no crash, no hang, no memory, nothing accepted unseen."""

import numpy as np
import pytest

from tests.robustness import NIGHT
from tests.robustness.fuzzer import attack, summary
from tests.robustness.mutations import damage
from tests.robustness.target import FAILURES, load_group
from tests.robustness.traces import SAMPLE_TRACE, wires_as_text

LIGHT = (
    "plans:text_targets",
    "traces:wire_targets",
    "plans:plan_targets",
    "traces:trace_targets",
    "records:record_targets",
)
HEAVY = "runs:run_targets"
INPUTS = 23_000 if NIGHT else 40
"""For each unit of weight, of which there are 44 in all: a million by night."""
CHANGES = 10**9 if NIGHT else 200
"""Bits and cuts of a file, at most."""
WITH_CHECKSUM = (*LIGHT[2:], HEAVY)
SLOW = (LIGHT[3], HEAVY)
"""Of files of seven encodings, and of those with checkpoints in them."""


def seen(tally):
    return {name for name in FAILURES if tally.verdicts[name]}


@pytest.mark.parametrize(
    "group", [*LIGHT[:2], *(pytest.param(one, marks=pytest.mark.slow) for one in (*LIGHT[2:], HEAVY))]
)
def test_malformed_inputs_are_refused_or_harmless(group):
    tallies = attack(f"tests.robustness.{group}", INPUTS)
    print(f"{group}: {summary(tallies)}")
    assert {name: tally.failures for name, tally in tallies.items() if seen(tally)} == {}
    for tally in tallies.values():
        assert tally.verdicts.total() >= INPUTS
        assert tally.verdicts["refused"] > INPUTS / 5


@pytest.mark.slow
def test_every_kind_of_defect_is_seen():
    found = attack("tests.robustness.fuzz_controls:readers", 100, hangs_after_s=8, most_failures=1)
    assert {name: seen(tally) for name, tally in found.items()} == {
        "sound": set(),
        "accepts damage": {"accepted wrong"},
        "breaks a rule": {"accepted wrong"},
        "traceback": {"traceback"},
        "names no file": {"names no file"},
        "crash": {"crash"},
        "hang": {"hang"},
        "takes memory": {"over memory"},
        "takes address space": {"traceback"},
    }


@pytest.mark.parametrize(
    "group", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in WITH_CHECKSUM]
)
def test_every_bit_and_every_cut_of_a_file_with_a_checksum_counts(tmp_path, group):
    """A flipped bit is refused or changes nothing, and is nearly always refused; a cut always is."""
    for target in load_group(f"tests.robustness.{group}", tmp_path):
        if not target.has_checksum:
            continue
        raw = target.make(np.random.default_rng(3))
        expected = target.content(raw)
        step = -(-8 * len(raw) // CHANGES)
        refused = total = 0
        for bit in range(0, 8 * len(raw), step):
            damaged = bytearray(raw)
            damaged[bit // 8] ^= 1 << bit % 8
            verdict, said = target.judge(bytes(damaged), expected, forged=False)
            assert verdict in ("refused", "same"), (target.name, bit, verdict, said)
            refused, total = refused + (verdict == "refused"), total + 1
        assert refused > 0.9 * total, target.name
        for size in range(0, len(raw), step):
            assert target.judge(raw[:size], expected, forged=False) == ("refused", ""), (target.name, size)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, _, parts in wires_as_text() for part in parts])
def test_what_a_wire_repeats_cannot_change_routes(name, part):
    """Names of types and shapes of an array, which the answer has besides."""
    target = next(each for each in load_group("tests.robustness.traces:wire_targets", None) if each.name == name)
    raw, expected, rng = target.make(None), target.content(target.make(None)), np.random.default_rng(12)
    assert target.read(raw).equals(SAMPLE_TRACE)
    start = raw.index(part)
    for _ in range(500):
        changed = raw[:start] + damage(part, rng) + raw[start + len(part) :]
        assert target.judge(changed, expected, forged=False)[0] in ("refused", "same")
