"""The code of docs/verl.md, and the configuration of examples/verl as verl itself reads it."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make test-verl`")

from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass

from foreroute.trainers.verl.settings import replay_of
from tests.trainers.verl.verl_batches import FACTS, padded, sequences

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_block_of_the_page_runs():
    [code] = FENCE.findall((ROOT / "docs" / "verl.md").read_text())
    exec(code, {"batch": padded(sequences(3)), "facts": FACTS})


def test_verl_reads_the_configuration_of_the_example_as_meant():
    script = (ROOT / "examples" / "verl" / "grpo_r3.sh").read_text()
    command = script[script.index("python3 -m") :].replace("$DATA", "data").replace("$MODEL", "model")
    words = [word for word in shlex.split(command) if "=" in word]
    page = [line.strip() for line in (ROOT / "docs" / "verl.md").read_text().splitlines() if line.startswith("    ")]
    assert set(words) >= {line for line in page if "actor_rollout_ref." in line}
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=words)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.engine.strategy, replay_of(actor.engine)) == ("fsdp2", "R3")
    assert config.actor_rollout_ref.ref.strategy == "fsdp2"
    assert config.actor_rollout_ref.ref.fsdp_config.forward_only
    assert "router_replay" not in config.actor_rollout_ref.ref.fsdp_config
    assert config.actor_rollout_ref.model.external_lib == "foreroute.trainers.verl.fsdp"
