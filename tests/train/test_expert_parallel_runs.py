"""Runs on several ranks: that they resume, on as many ranks or others, and end together."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreroute.capture import load_generation
from foreroute.errors import ConfigError
from foreroute.train import train
from foreroute.train.folder import load_checkpoint
from tests.train.expert_parallel_steps import (
    path_of,
    run,
    run_config,
)
from tests.train.small_runs import records, same_state

pytestmark = pytest.mark.slow


def test_an_interrupted_run_on_two_ranks_ends_as_the_uninterrupted_one(workers, tmp_path):
    """With homes that move from where they are."""
    config = run_config(2, parallel={"plan": {"home_moves": 4}})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert workers(2).run(run, config, whole) == [2, 0]
    # rank 0 alone is asked to stop, and rank 1 stops with it
    assert workers(2).run(run, config, stopped, False, 1) == [1, 0]
    assert workers(2).run(run, config, stopped, True) == [1, 0]
    assert learned(stopped) == learned(whole)
    assert same_state(checkpoint(stopped, 2), checkpoint(whole, 2))
    assert all(record["execution"]["home_moves"] for record in records(whole)), "the case must move experts"
    trace = load_generation(whole / "rollouts" / "step-000000.safetensors").trace
    assert len(trace) == 8 * 4, "the trace holds the rollouts of all ranks"
    written = AutoModelForCausalLM.from_pretrained(
        stopped / "model", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).state_dict()
    assert same_state(dict(written), checkpoint(stopped, 2)["model"]), "the model is whole"
    # and with one process instead of two
    train(run_config(1, rl={"steps": 3}), whole, resume=True)
    assert [record.get("execution", {}).get("ranks", 1) for record in records(whole)] == [2, 2, 1]


def test_one_process_is_not_two(tmp_path):
    with pytest.raises(ConfigError):
        train(run_config(2), tmp_path / "run")


def checkpoint(folder, step):
    return load_checkpoint(path_of(folder, step))


def learned(folder):
    """Records without the seconds and paths in them."""
    timed = ("moving_homes_s", "exposed_transfer_s", "planning_s", "exposed_planning_s")
    found = records(folder)
    for record in found:
        for key in timed:
            del record["execution"][key]
        # which path they took follows from links that each run measures
        moved = record["execution"]["bytes"]
        moved["weights"] = moved.pop("host") + moved.pop("direct")
    return found
