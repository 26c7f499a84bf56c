"""The code of docs/verl.md, and the configuration of examples/verl as verl itself reads it."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="there is no verl in this environment: run `make night PART=verl`")

from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass

from examples.verl import demo_cluster
from foreroute.trainers.verl.planning import PlanningMegatronConfig
from foreroute.trainers.verl.settings import replay_of
from tests.trainers.verl.verl_batches import SPEC, padded, sequences

ROOT = Path(__file__).parents[3]
OTHERWISE = ["model_engine=megatron", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_block_of_the_page_runs():
    [code] = FENCE.findall((ROOT / "docs" / "verl.md").read_text())
    exec(code, {"batch": padded(sequences(3)), "spec": SPEC})


def test_verl_reads_the_configuration_of_the_example_as_meant():
    script = (ROOT / "examples" / "verl" / "grpo_r3.sh").read_text()
    command = script[script.index("python3 -m") :].replace("$DATA", "data").replace("$MODEL", "model")
    words = [word for word in shlex.split(command) if "=" in word]
    fsdp, _ = lines_of_page()
    assert len(fsdp) == 3
    assert set(words) >= set(fsdp)
    config, actor = composed(words)
    assert (actor.engine.strategy, replay_of(actor.engine)) == ("fsdp2", "R3")
    assert "router_replay" not in config.actor_rollout_ref.ref.fsdp_config
    assert config.actor_rollout_ref.model.external_lib == "foreroute.trainers.verl.fsdp"


def test_verl_reads_the_lines_of_megatron_as_meant():
    _, lines = lines_of_page()
    names = {line.partition("=")[0] for line in demo_cluster.SETTINGS + demo_cluster.MEGATRON}
    assert {line.partition("=")[0] for line in lines} <= names
    config, actor = composed([*OTHERWISE, *lines])
    assert isinstance(actor.engine, PlanningMegatronConfig)
    assert (actor.engine.strategy, replay_of(actor.engine)) == ("megatron", "R3")
    assert (actor.engine.redundant_slots, actor.engine.hardware) == (2, "h100")
    # the reference is left alone
    assert config.actor_rollout_ref.ref.megatron["_target_"] == "verl.workers.config.McoreEngineConfig"
    assert config.actor_rollout_ref.ref.megatron.router_replay.mode == "disabled"


def composed(overrides):
    """verl's configuration, and that of its actor as its engine takes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    return config, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def lines_of_page():
    """Lines of configuration on the page, of FSDP and of Megatron."""
    page = (ROOT / "docs" / "verl.md").read_text().partition("## Sampling masks")[0].partition("## Megatron")
    parts = [
        [line.strip() for line in part.splitlines() if line.startswith(("    actor", "    +"))]
        for part in (page[0], page[2])
    ]
    assert all(parts)
    return parts
