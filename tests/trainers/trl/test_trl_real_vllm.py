"""A tool in the loop of TRL on a real vLLM: `tools_on_vllm` says what a CPU needs."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OF_TRL = ("trl", "accelerate", "datasets", "pyarrow", "pandas", "dill", "xxhash", "multiprocess", "python-dateutil")


@pytest.fixture
def run(tmp_path, vllm_python):
    """One step in vLLM's Python, which finds TRL and what it stands on here: both have the same torch."""
    layer = tmp_path / "site-packages"  # a name by which dill tells code that is installed
    layer.mkdir()
    for name in OF_TRL:
        for file in importlib.metadata.files(name):
            top = file.parts[0]
            if not top.startswith((".", "_")) or top.startswith("_multiprocess"):
                (layer / top).exists() or (layer / top).symlink_to(Path(file.locate()).parents[len(file.parts) - 2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, layer)))}

    def worker(*arguments):
        command = [vllm_python, "-m", "tests.trainers.trl.tools_on_vllm", tmp_path / "-".join(arguments), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"k3"')))

    return worker


@pytest.mark.exhaustive
def test_turns_of_a_real_vllm_are_replayed_to_its_log_probs(run):
    found = run("R3", "float32")
    assert max(found["turns"]) > 1
    assert found["disagreement"] == [0.0]
    assert found["k3"][0] < 1e-9
    assert run("none", "bfloat16")["disagreement"][0] > 0.005  # the control
