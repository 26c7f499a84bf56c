"""Routes that were really made: a model of 64 experts learns text of four kinds, then RL on all of them at once.

The model learns with the usual load-balancing loss and is trained further by the trainer of the product, which records
every rollout. The traces of all steps are kept beside the checkpoints that other cells start from; the figures of a
cell are made of them alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.balancing import balancing_of
from experiments.cells import Cell
from experiments.models import configuration
from experiments.texts import KINDS, SHORTEST, TextTask, encode, text
from experiments.unevenness import Ints, figures_of, kind_information, sequence_counts
from foreroute.adapters import hf
from foreroute.files.writing import write_atomically
from foreroute.trace import RoutingTrace, load, save
from foreroute.train import TrainConfig
from foreroute.train.loop import make_trainer
from foreroute.train.policy import make_engine, make_policy
from foreroute.train.warm_start import warm_start

WATCHED = 16
"""Texts of each kind that say how far experts keep to a kind before and after learning."""


def run_routes(cell: Cell, base: dict[str, Any], starts: Path) -> dict[str, Any]:
    """Measure the traces of a seed; see `recorded`."""
    traces, kind_S, learned = recorded(cell, base, starts)
    return learned | figures_of(traces, kind_S, cell.seed) | balancing_of(traces, kind_S, cell.seed)


def recorded(cell: Cell, base: dict[str, Any], starts: Path) -> tuple[list[RoutingTrace], Ints, dict[str, Any]]:
    """Make the traces of a seed, unless they are there: of all steps, with the kind of each sequence and figures."""
    config = configuration(base, cell.settings, cell.seed)
    torch.set_num_threads(config.threads)
    folder = starts / f"routes-{cell.digest(base)}"
    learned = folder / "learned.json"
    if not learned.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(learned, json.dumps(make_traces(config, folder)))
    traces = [load(folder / f"step-{step}.safetensors") for step in range(config.rl.steps)]
    # prompts take kinds in turn, and each has a group of responses
    kind_S = np.arange(len(traces[0])) // config.rollout.group_size % len(KINDS)
    return traces, kind_S, json.loads(learned.read_text(encoding="utf-8"))


def make_traces(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Pretrain, then take the steps of RL, with the trace of each as `step-N.safetensors` in the folder.

    Give the loss of pretraining in nats per character, rewards, and bits that an expert says about the kind of a text.
    """
    task = TextTask()
    policy = make_policy(config, task)
    untrained = _kind_bits(policy)
    losses: list[float] = []
    warm_start(policy.model, config, task, lambda step, loss: losses.append(loss), lambda: False)
    trained = _kind_bits(policy)
    trainer = make_trainer(config, task, policy, make_engine(config, policy))
    rewards = []
    for step in range(config.rl.steps):
        experience, _ = trainer.run_step()
        save(experience.generation.trace, folder / f"step-{step}.safetensors", overwrite=True)
        rewards.append(round(float(experience.rewards_S.mean()), 4))
    return {"loss": losses[-1], "rewards": rewards, "kind_bits": {"untrained": untrained, "trained": trained}}


def _kind_bits(policy: hf.RoutedTransformer) -> float:
    """Measure bits about kinds on the same texts whenever it is asked."""
    rng = np.random.default_rng(0)
    tokens = np.stack([encode(text(kind, rng)[:SHORTEST]) for kind in KINDS for _ in range(WATCHED)])
    with torch.no_grad(), policy.record() as recording:
        policy.model(input_ids=torch.from_numpy(tokens).long())
    trace: RoutingTrace = recording.trace()
    kind_S = np.repeat(np.arange(len(KINDS)), WATCHED)
    return kind_information(sequence_counts(trace), kind_S)
