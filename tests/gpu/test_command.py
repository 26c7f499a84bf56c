"""`make gpu`: it takes a bare Python as it is, and a part of the figures that crashes, hangs or is late costs no other.

That a test which does so costs no other is the work of pytest-xdist and of pytest's faulthandler_exit_on_timeout.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import runner
from tests import conftest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_a_python_that_has_no_foreroute_takes_the_checkout(tmp_path):
    """As a machine with a GPU has it, where nothing is installed. Figures are measured though the tests fail."""
    python = tmp_path / "python"
    shown = f"{sys.executable} -S -c 'import foreroute; print(foreroute.__file__)'"
    python.write_text(f'#!/bin/sh\n{shown}\necho "$@"\n[ "$2" = benchmarks ]\n')
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["make", "--silent", "gpu", f"PYTHON={python}", "DEVICE=cuda:1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=kept, timeout=60, check=False)
    tests, figures = done.stdout.split(f"{ROOT / 'src' / 'foreroute' / '__init__.py'}\n")[1:]
    assert "-m pytest -m gpu" in tests
    assert "--device cuda:1" in tests
    assert "-m benchmarks gpu --json --device cuda:1" in figures
    assert done.returncode != 0


def given(**options):
    """What pytest was told on its command line."""
    return SimpleNamespace(getoption=lambda name: options[name.strip("-").replace("-", "_")])


def test_what_is_left_when_time_is_used_up_is_skipped():
    with pytest.raises(pytest.skip.Exception, match=r"time.*used up"):
        conftest.pytest_runtest_setup(SimpleNamespace(config=given(ends_at=time.time() - 1)))
    conftest.pytest_runtest_setup(SimpleNamespace(config=given(ends_at=float("inf"))))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:99", "GPUs here; --device cpu shows that the command works"),
        ("meta", "is not supported; expected cuda, cuda:N or cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, said):
    with pytest.raises(pytest.UsageError) as told:
        conftest.pytest_configure(given(device=device))
    assert str(told.value).startswith(f"--device {device}")
    assert str(told.value).endswith(said)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """`measured(code)`: the outcome and the figures of a part of this code."""

    def of(code, seconds=60):
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(PART).format(code=code))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
        return runner._measured("part", "cpu", seconds)

    return of


PART = """
    import os, signal, sys, time, types

    part = types.ModuleType("benchmarks.gpu.part")
    def run(figures):
        figures.record(before_ms=3.0)
        {code}
    part.run = run
    sys.modules["benchmarks.gpu.part"] = part
"""


@pytest.mark.exhaustive
def test_what_a_part_found_before_it_broke_is_kept(measured, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_S", 1)
    monkeypatch.setattr(runner, "LEAST_S", 0)
    found = {"before_ms": 3.0}
    assert measured("pass") == ("passed", found)
    assert measured("raise ValueError('broken')") == ("failed: ValueError: broken", found)
    assert measured("import no_such_package") == ("skipped: No module named 'no_such_package'", found)
    assert measured("os.kill(os.getpid(), signal.SIGSEGV)") == ("failed: it died of SIGSEGV", found)
    for seconds in (3, 12, 48):  # a busy machine takes longer to begin
        late = measured("time.sleep(600)", seconds)
        if late[1]:
            break
    assert late == (f"failed: it was ended after {seconds + 1} s", found)
    assert measured("pass", -1) == ("skipped: the time of the whole run was used up", {})


@pytest.mark.exhaustive
def test_every_part_is_measured_on_a_cpu():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["parts"].values()) == {"passed"}, done.stderr
    assert done.returncode == 0
    assert list(report["parts"]) == list(report["metrics"]) == list(runner.PARTS)
    assert report["metrics"]["cost"]["step_ratio"] > 0
