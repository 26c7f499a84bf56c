"""Trainer against engine at fixed weights: the same rollout, under every way to choose its routes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import Cell
from experiments.models import configuration, merged
from experiments.starts import loaded
from experiments.tampering import shifted
from foreroute.capture import Generation
from foreroute.mismatch import RoutingMismatch, TokenMismatch
from foreroute.records.step_record import Side
from foreroute.train.loop import make_schedule, make_trainer
from foreroute.train.policy import Alone, make_engine
from foreroute.train.record import Recomputed, mismatch_of, mismatch_record

KEPT = ("response_tokens", "k3", "f2", "f1.5", "differing_share", "differing_tokens_share", "max_abs_log_ratio")


def run_static(cell: Cell, base: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Sample once and recompute without replay; an MoE also with R3, and with shifted routes."""
    routed = cell.start != "dense"
    config = configuration(base, merged(cell.settings, {"rl": {"routing": "R3" if routed else "none"}}), cell.seed)
    task, policy = loaded(config, checkpoint)
    trainer = make_trainer(config, task, policy, make_engine(config, policy))
    experience = trainer.roll_out()
    generation = experience.generation
    recompute, _ = make_schedule(experience, config.rl, Alone(), seed=(config.seed, 0))

    def passed(generation: Generation, side: Side) -> Recomputed:
        return trainer.recompute(generation, recompute, side)

    passes = {"none": (generation, passed(generation, "native"))}
    if routed:
        off = replace(generation, trace=shifted(generation.trace))
        passes["R3"] = (generation, passed(generation, "replayed"))
        passes["shifted"] = (generation, passed(off, "replayed"))
    figures: dict[str, Any] = {name: figures_of(*mismatch_of(*each)) for name, each in passes.items()}
    return figures | {
        "reward": float(np.mean(experience.rewards_S)),
        "entropy": float(passes["none"][1].entropy_R.mean()),
    }


def figures_of(tokens: TokenMismatch, routes: RoutingMismatch) -> dict[str, float]:
    """Keep the figures of a comparison of two passes that the page needs."""
    record = mismatch_record(tokens, routes).to_json()
    return {name: record[name] for name in KEPT}
