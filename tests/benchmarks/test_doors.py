"""A fixed sample of `python -m benchmarks doors`: in a process of its own, which forks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = """
import json, sys
from benchmarks import doors
print(json.dumps(doors.judged(doors.tried(most=60, verbs=["inspect", "validate", "convert", "diff", "plan"]))))
"""


@pytest.mark.slow
def test_no_input_output_or_stream_breaks_a_verb():
    command = [sys.executable, "-c", SAMPLE]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == {name: [] for name in result["failures"]}
    assert result["metrics"]["cases"] >= 60
