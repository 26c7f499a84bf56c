"""Trainer against engine at fixed weights: the same rollout, under every way to choose its routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.cells import Cell
from experiments.models import merged
from experiments.starts import configuration
from experiments.tampering import shifted
from foreroute.capture import Generation
from foreroute.train import load_checkpoint
from foreroute.train.loop import make_trainer
from foreroute.train.measure import mismatch_of, mismatch_record
from foreroute.train.model import make_engine, make_policy
from foreroute.train.passes import PolicyExecution, Recomputed, make_schedule, recompute
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import roll_out
from foreroute.train.tasks import make_task

KEPT = ("response_tokens", "k3", "f2", "f1.5", "differing_share", "differing_tokens_share", "max_abs_log_ratio")


def run_static(cell: Cell, base: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Sample once and recompute without replay; an MoE also with R3, with gate weights too, and with shifted routes."""
    routed = cell.start != "dense"
    # R3+weights makes the engine record gate weights
    routing = {"rl": {"routing": "R3+weights" if routed else "none"}}
    config = configuration(base, merged(cell.settings, routing), cell.seed)
    torch.set_num_threads(config.threads)
    task = make_task(config)
    policy = make_policy(config, task)
    policy.model.load_state_dict(load_checkpoint(checkpoint)["model"])
    trainer = make_trainer(config, task, policy, PolicyExecution(policy), make_engine(config, policy))
    trainer.engine.load_weights(policy.model.state_dict(), version=0)
    experience = roll_out(trainer.engine, task, config, 0, Ranks())
    generation = experience.generation
    stage = make_schedule(experience, config.rl, Ranks(), seed=(config.seed, 0)).recompute

    def passed(generation: Generation, replay: bool, gate_weights: bool = False) -> Recomputed:
        return recompute(
            policy,
            trainer.execution,
            generation,
            stage,
            temperature=config.rollout.temperature,
            replay=replay,
            weight_version=0,
            gate_weights=gate_weights,
        )

    passes = {"none": (generation, passed(generation, False))}
    if routed:
        off = replace(generation, trace=shifted(generation.trace))
        passes["R3"] = (generation, passed(generation, True))
        passes["R3+weights"] = (generation, passed(generation, True, True))
        passes["shifted"] = (generation, passed(off, True))
    figures: dict[str, Any] = {name: _figures(*each) for name, each in passes.items()}
    return figures | {
        "reward": float(np.mean(experience.rewards_S)),
        "entropy": float(passes["none"][1].entropy_R.mean()),
    }


def _figures(generation: Generation, result: Recomputed) -> dict[str, float]:
    record: Mapping[str, Any] = mismatch_record(*mismatch_of(generation, result))
    return {name: record[name] for name in KEPT}
