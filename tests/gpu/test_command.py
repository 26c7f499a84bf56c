"""`make gpu` takes a bare Python as it is, and its figures are measured on a CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import runner

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


@pytest.mark.exhaustive
def test_every_part_is_measured_on_a_cpu():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["parts"].values()) == {"passed"}, done.stderr
    assert done.returncode == 0
    assert list(report["parts"]) == list(report["metrics"]) == list(runner.PARTS)
    assert report["metrics"]["cost"]["step_ratio"] > 0
