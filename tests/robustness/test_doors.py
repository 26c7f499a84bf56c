"""No input, output or stream breaks a verb of the command line."""

import signal
import sys
from pathlib import Path

import pytest

import foreroute as fr
from foreroute.cli.demo import demo_values
from tests.robustness import NIGHT, doors
from tests.robustness.doors_cases import ANY, Case
from tests.traces import random_trace

MOST = 0 if NIGHT else 16
"""Cases of all verbs: by night all of them, which are about a thousand."""


@pytest.mark.slow
def test_no_input_output_or_stream_breaks_a_verb(monkeypatch):
    values = demo_values()
    values["warm_start"]["max_steps"] = 1  # it takes minutes
    values["rollout"] |= {"prompts": 2, "group_size": 2}
    monkeypatch.setattr("foreroute.cli.demo.demo_values", lambda: values)
    monkeypatch.setenv("COLUMNS", "100")
    number, failures = doors.try_cases(MOST)
    print(f"{number} cases: {', '.join(f'{len(names)} {kind}' for kind, names in failures.items())}")
    assert {kind: names for kind, names in failures.items() if names} == {}
    assert number >= (MOST or 800)


def ends_with(code, said=""):
    print(said, file=sys.stderr)
    sys.exit(code)


CARELESS = {
    "tracebacks": lambda: {}["key"],
    "hangs": signal.pause,
    "wrong exit codes": lambda: ends_with(3, "no code of ours"),
    "raw bytes": lambda: print("\x1b[2J"),
    "silent": lambda: ends_with(2),
    "destroyed": lambda: Path("there.txt").unlink(),
}
"""Verbs with one defect each, by its kind."""


@pytest.mark.parametrize(
    "defect", ["", *(pytest.param(each, marks=pytest.mark.slow) if each == "hangs" else each for each in CARELESS)]
)
def test_what_a_careless_verb_does_is_seen(tmp_path, monkeypatch, defect):
    good = tmp_path / "good"
    good.mkdir()
    fr.save(random_trace(0), good / "trace.safetensors")
    monkeypatch.setattr("foreroute.cli.main.main", CARELESS.get(defect, lambda: None))
    monkeypatch.setattr(doors, "DEADLINE_S", 1.0 if defect == "hangs" else 60.0)
    case = Case("inspect", "trace", "valid", "inspect @", ANY, given="given", valid="trace.safetensors")
    found = doors.judged([doors.run(case, tmp_path / "case", good)])
    assert {name for name, cases in found.items() if cases} == {defect} - {""}
