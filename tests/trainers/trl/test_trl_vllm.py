"""vLLM in TRL's own two modes, on stand-ins that answer with vLLM's fields; and a real one: `tools_on_vllm`."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

from foreroute.errors import CaptureError
from tests.trainers.trl import tools_runs
from tests.trainers.trl.trl_runs import logged, trained
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, colocated, served

MODES = {"colocate": (colocated, COLOCATE), "server": (served, SERVER)}


@pytest.mark.slow
@pytest.mark.shows("TRL", "vLLM, served and colocated (stand-ins; real vLLM in `make night`)")
@pytest.mark.parametrize("mode", MODES)
def test_routes_of_vllm_are_replayed_turn_by_turn_and_measured(mode, folder, monkeypatch):
    fake, settings = MODES[mode]
    first = {}
    for replay in ("none", "R3"):
        with monkeypatch.context() as patch:
            fake(patch)
            trainer = tools_runs.trained(folder, replay=replay, **settings)
        assert sum(not sampled[20:].all() for _, sampled, _ in tools_runs.sequences_of(trainer)) > 1
        first[replay] = {name: logged(trainer, f"mismatch/{name}")[0] for name in ("k3", "disagreement")}
    assert first["R3"]["disagreement"] == 0
    assert first["none"]["disagreement"] > 0.005
    assert first["R3"]["k3"] < first["none"]["k3"] / 2


@pytest.mark.slow
def test_a_server_that_returns_no_routes_is_refused_with_the_flag_to_start_it_with(folder, monkeypatch):
    served(monkeypatch, returns_routes=False)
    with pytest.raises(CaptureError, match="--enable-return-routed-experts"):
        trained(folder, **SERVER)


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
