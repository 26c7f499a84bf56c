"""Figures of `make gpu`, at the sizes of a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import runner

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_every_part_is_measured_on_a_cpu():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["parts"].values()) == {"passed"}, done.stderr
    assert done.returncode == 0
    assert list(report["parts"]) == list(report["metrics"]) == list(runner.PARTS)
    assert report["metrics"]["cost"]["step_ratio"] > 0
