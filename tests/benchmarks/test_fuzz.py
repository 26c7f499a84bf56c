"""A seeded sample of what `python -m benchmarks fuzz` tries, and whether it would see a defect."""

import pytest

from benchmarks import fuzz

BAD = ("crashes", "hangs", "accepted_wrong", "tracebacks", "over_memory")


@pytest.mark.slow
@pytest.mark.parametrize("group", fuzz.GROUPS)
def test_malformed_inputs_are_refused_or_harmless(group):
    found = fuzz.attack_all(1_000, groups=[group], seed=7)
    assert {name: found["metrics"][name] for name in BAD} == dict.fromkeys(BAD, 0), found["targets"]
    assert found["metrics"]["inputs"] >= 1_000
    assert found["metrics"]["refused"] > 500


def test_every_kind_of_defect_is_seen(monkeypatch):
    monkeypatch.setattr(fuzz, "SILENT_S", 2.0)
    monkeypatch.setattr(fuzz, "MOST_FAILURES", 2)
    found = fuzz.attack_all(800, groups=["tests.benchmarks.fuzz_controls:readers"], seed=7)["targets"]

    def seen(name):
        tally = found[name]
        kinds = {kind for kind in ("accepted_wrong", "traceback", "memory") if tally["verdicts"].get(kind)}
        return kinds | {kind for kind in ("crashes", "hangs") if tally[kind]}

    assert {name: seen(name) for name in found} == {
        "sound": set(),
        "accepts damage": {"accepted_wrong"},
        "breaks a rule": {"accepted_wrong"},
        "traceback": {"traceback"},
        "crashes": {"crashes"},
        "hangs": {"hangs"},
        "takes memory": {"memory"},
        "takes address space": {"traceback"},
    }
