"""Malformed inputs for every reader of what others wrote: no crash, no hang, no memory, nothing accepted unseen."""

import ctypes
import json
import signal

import numpy as np
import pytest

from foreroute.errors import InputError
from foreroute.layout.by_routes import _sum_rows
from tests.robustness import NIGHT
from tests.robustness.fuzzer import attack, summary
from tests.robustness.target import FAILURES, Target

GROUPS = (
    "plans:text_targets",
    "traces:wire_targets",
    "plans:plan_targets",
    "traces:trace_targets",
    "records:record_targets",
    "runs:run_targets",
)
INPUTS = 23_000 if NIGHT else 25
"""For each unit of weight, of which there are 44 in all: a million by night."""


def seen(tally):
    return {name for name in FAILURES if tally.verdicts[name]}


@pytest.mark.parametrize(
    "group",
    [
        *GROUPS[:2],
        *(pytest.param(one, marks=pytest.mark.slow) for one in GROUPS[2:-1]),
        pytest.param(GROUPS[-1], marks=pytest.mark.exhaustive),
    ],
)
def test_malformed_inputs_are_refused_or_harmless(group):
    tallies = attack(f"tests.robustness.{group}", INPUTS)
    print(f"{group}: {summary(tallies)}")
    assert {name: tally.failures for name, tally in tallies.items() if seen(tally)} == {}
    for tally in tallies.values():
        assert tally.verdicts.total() >= INPUTS
        assert tally.verdicts["refused"] > INPUTS / 5


def readers(folder):
    """Readers with one defect each, which the fuzzer must see."""

    def make(rng):
        return json.dumps({"values": list(range(40))}).encode()

    def sound(raw):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InputError("no JSON") from error

    def names_no_file(path):
        if path.read_bytes() != make(None):
            raise InputError("the file holds something else")

    def harmed(harm):
        def read(raw):
            if b"7" not in raw:
                harm()
            return sound(raw)

        return read

    def check(raw, value):
        assert max(value["values"]) < 40

    # one layer of two experts, whose second is said to live on rank 2 of 2
    no_such_rank = np.ones((1, 1, 2), np.int32), np.array([[0, 2]]), np.zeros((1, 1, 2, 8), np.int32)

    def target(name, read, check=lambda raw, value: None, **others):
        return Target(name, make, read, check=check, **others)

    return [
        target("sound", sound),
        target("accepts damage", sound, has_checksum=True),
        target("breaks a rule", sound, check=check),
        target("traceback", json.loads),
        target("names no file", names_no_file, file=folder / "given", has_checksum=True),
        target("crash", harmed(lambda: ctypes.string_at(0))),
        target("oversteps a bound", harmed(lambda: _sum_rows(*no_such_rank))),
        target("hang", harmed(lambda: signal.sigwait([signal.SIGUSR1]))),
        target("takes memory", harmed(lambda: np.empty(100 << 20, np.uint8))),
    ]


DEFECTS = {
    "sound": set(),
    "accepts damage": {"accepted wrong"},
    "breaks a rule": {"accepted wrong"},
    "traceback": {"traceback"},
    "names no file": {"names no file"},
    "takes memory": {"traceback"},
}
ENDING = {"crash": {"crash"}, "oversteps a bound": {"crash"}, "hang": {"hang"}}


@pytest.mark.slow
def test_every_kind_of_defect_is_seen():
    for expected in (DEFECTS, *({name: endings} for name, endings in ENDING.items())):
        found = attack("tests.robustness.test_fuzz:readers", 50, names=list(expected), hangs_after_s=1)
        assert {name: seen(tally) for name, tally in found.items()} == expected
