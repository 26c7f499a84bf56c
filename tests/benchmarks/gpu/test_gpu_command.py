"""The whole command on a CPU, so that it works when a GPU is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def proof(folder, *arguments, **environment):
    """The exit code and the JSON of the last line."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", "--device", "cpu", "--out", str(folder), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=600, env=os.environ | environment, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_python_that_has_no_foreroute_takes_the_checkout(tmp_path):
    """As a machine with a GPU has it, where nothing is installed."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c 'import foreroute; print(foreroute.__file__)'\n")
    python.chmod(0o755)
    command = ["make", "--silent", "gpu", f"PYTHON={python}"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=kept, timeout=60, check=False)
    assert done.stdout == f"{ROOT / 'src' / 'foreroute' / '__init__.py'}\n", done.stderr


@pytest.mark.exhaustive
def test_every_part_passes_on_a_cpu_or_says_why_it_is_skipped(tmp_path):
    code, report = proof(tmp_path / "out")
    assert {name: outcome for name, outcome in report["parts"].items() if outcome != "passed"} in ({}, MEGATRON_ABSENT)
    assert code == 0
    assert list(report["parts"]) == list(report["metrics"]) == list(PARTS)
    assert all("passed" in checks.values() for name, checks in report["checks"].items() if name != "megatron")
    assert report["metrics"]["cost"]["step_ratio"] > 0
    assert json.loads((tmp_path / "out" / "gpu.json").read_text())["metrics"] == report["metrics"]
    assert "8 parts passed" in (tmp_path / "out" / "gpu.html").read_text()


MEGATRON_ABSENT = {"megatron": "skipped: run: megatron.core cannot be imported: No module named 'megatron'"}


@pytest.mark.exhaustive
def test_a_python_without_some_packages_skips_by_name_what_needs_them(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(absent=["pydantic", "megatron", "trl"]))
    code, report = proof(tmp_path / "out", "--parts", "trainer", "megatron", "mismatch", PYTHONPATH=str(tmp_path))
    assert report["parts"]["trainer"] == "skipped: run: pydantic cannot be imported: No module named 'pydantic'"
    assert report["parts"]["megatron"].startswith("skipped: run: megatron.core cannot be imported")
    assert report["parts"]["mismatch"] == "passed"
    assert code == 0
