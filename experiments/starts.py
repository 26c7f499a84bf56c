"""Checkpoints that RL starts from: trained on right answers until the model half knows the task, once for each seed."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from experiments.models import configuration, start_path
from foreroute.adapters import hf
from foreroute.train import TrainConfig, train
from foreroute.train.chain import Task
from foreroute.train.folder import load_checkpoint
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task


def started(folder: Path, start: str, base: dict[str, Any], seed: int) -> Path:
    """The checkpoint that a cell starts from, made by the first who asks; whoever asks meanwhile waits."""
    checkpoint = start_path(folder, start, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{start}-{seed}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not checkpoint.exists():
            run = folder / f"{start}-{seed}"
            shutil.rmtree(run, ignore_errors=True)
            train(configuration(base, {"rl": {"steps": 1}}, seed), run)
            # in one act: a start that exists is whole
            os.replace(run / "checkpoints" / "step-000000.safetensors", checkpoint)
            shutil.rmtree(run)
    return checkpoint


def loaded(config: TrainConfig, checkpoint: Path) -> tuple[Task, hf.RoutedTransformer]:
    """The task, and the policy with the weights of a start, as this process is to compute it."""
    torch.set_num_threads(config.threads)
    task = make_task(config)
    policy = make_policy(config, task)
    policy.model.load_state_dict(load_checkpoint(checkpoint)["model"])
    return task, policy
