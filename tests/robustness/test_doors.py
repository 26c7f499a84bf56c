"""No input, output or stream breaks a verb of the command line."""

import json
import subprocess
import sys

import pytest

from tests.processes import environment
from tests.robustness import NIGHT
from tests.robustness.doors import Result, judged
from tests.robustness.doors_cases import FINE, REFUSED, Case, matrix

VERBS = sorted({case.verb for case in matrix()})
WITHOUT_TORCH = ["convert", "diff", "inspect", "plan", "validate"]
MORE = [([verb], 0) for verb in VERBS] if NIGHT else [(VERBS, 80)]
"""Verbs, and how many of their cases, all for 0: about a thousand by night."""


@pytest.mark.parametrize(
    ("verbs", "most"),
    [
        (WITHOUT_TORCH, 40),
        *(pytest.param(verbs, most, marks=pytest.mark.slow) for verbs, most in MORE),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_no_input_output_or_stream_breaks_a_verb(verbs, most):
    variables = environment(NUMBA_DISABLE_JIT="1", HF_HUB_OFFLINE="1", COLUMNS="100")
    command = [sys.executable, "-m", "tests.robustness.doors", str(most), *verbs]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    counted = ", ".join(f"{len(names)} {kind}" for kind, names in found["failures"].items())
    print(f"{found['cases']} cases of {', '.join(verbs)}: {counted}")
    assert {kind: names for kind, names in found["failures"].items() if names} == {}
    assert found["cases"] >= max(most, 20)


def case(condition, codes, **more):
    return Case("inspect", "trace", condition, "inspect @", codes, **more)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("tracebacks", (case("valid", FINE), 1, b"", b"Traceback (most recent call last):\n", False, [])),
        ("hangs", (case("valid", FINE), -9, b"", b"", True, [])),
        ("wrong exit codes", (case("missing", REFUSED), 0, b"a trace\n", b"", False, [])),
        ("raw bytes", (case("valid", FINE), 0, b"\x1b[2J", b"", False, [])),
        ("raw bytes", (case("valid", FINE), 0, b"\xff", b"", False, [])),
        ("silent", (case("missing", REFUSED), 2, b"", b"", False, [])),
        ("destroyed", (case("valid", FINE), 0, b"", b"", False, ["'there.txt'"])),
    ],
)
def test_every_kind_of_failure_is_told_apart(kind, result):
    sound = Result(case("valid", FINE), 0, b"a trace\n", b"", False, [])
    assert {name for name, cases in judged([sound, Result(*result)]).items() if cases} == {kind}
