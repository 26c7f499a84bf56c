"""Checkpoints of a run, behind every step, in Megatron's distributed format: the same command goes on from the last.

Experts are kept in logical order, wherever they live. Where that was is kept beside them, so that the plan, and with it
the order of every sum, goes on as it would have.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

from examples.pipeline.policy import Policy
from examples.pipeline.sync import on_first_rank

PROGRESS = "progress.json"
"""In the folder of a checkpoint, and written last: a folder without it is of a run that ended while it wrote."""


def make_optimizer(policy: Policy, learning_rate: float) -> FP32Optimizer:
    """Adam, in what tells Megatron's checkpoints whose its state is."""
    group = {"params": list(policy.model.parameters()), "wd_mult": 0.0, "lr_mult": 1.0}
    adam = torch.optim.AdamW(
        [{**group, "is_expert_parallel": False, "is_decoupled_lr": False}], lr=learning_rate, weight_decay=0.0
    )
    return FP32Optimizer(adam, OptimizerConfig(lr=learning_rate, clip_grad=0.0), _begin_state)


def save(policy: Policy, optimizer: FP32Optimizer, folder: Path, step: int) -> None:
    """Write what the next step begins with, and remove what an earlier one began with. All ranks call it."""
    path = folder / f"step-{step:06}"
    on_first_rank(lambda: _make_empty(path))
    dist_checkpointing.save(_shards(policy, optimizer, is_loading=False), str(path))
    home_LE = policy.routed.home_LE

    def finish() -> None:
        written = path / f"{PROGRESS}.part"
        written.write_text(json.dumps({"steps": step + 1, "home_LE": home_LE.tolist()}))
        written.rename(path / PROGRESS)
        for other in folder.iterdir():
            if other != path:
                shutil.rmtree(other)

    on_first_rank(finish)


def load(policy: Policy, optimizer: FP32Optimizer, folder: Path) -> int:
    """Take over the last checkpoint of a run. All ranks call it. Returns how many steps it has done, 0 without one."""
    found = sorted(folder.glob(f"step-*/{PROGRESS}"))
    if not found:
        return 0
    progress = json.loads(found[-1].read_text())
    policy.routed.move_homes(np.array(progress["home_LE"]), optimizer)
    loaded = dist_checkpointing.load(_shards(policy, optimizer, is_loading=True), str(found[-1].parent))
    policy.model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return int(progress["steps"])


def _shards(policy: Policy, optimizer: FP32Optimizer, *, is_loading: bool) -> dict[str, Any]:
    model = {"model": policy.model.sharded_state_dict(metadata={})}
    return {**model, "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata={})}


def _begin_state(adam: torch.optim.AdamW, _: OptimizerConfig) -> None:
    """Where no step was made, as there is nothing yet to load into."""
    for parameter in adam.param_groups[0]["params"]:
        adam.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _make_empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
