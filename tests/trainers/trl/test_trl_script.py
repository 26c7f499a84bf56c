"""The scripts of examples/trl with R3."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.tiers import grid
from tests.trainers.trl.trl_runs import logged

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples" / "trl"


@grid("script", ["grpo_r3.py", "grpo_tools.py"], quick=0, day=1)
def test_scripts_replay_every_turn(script, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, folder])
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as Python does for a script
    trainer = runpy.run_path(str(EXAMPLES / script))["trainer"]
    assert len(logged(trainer, "loss")) == trainer.args.max_steps
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}
    # mini-batch by mini-batch a router left alone drifts from the rollout; what is lower for it: test_trl_vllm.py
    drift = logged(trainer, "mismatch/native_disagreement")
    assert script != "grpo_r3.py" or drift[1] > drift[0] > 0
    assert script != "grpo_tools.py" or min(logged(trainer, "tools/call_frequency")) > 0
