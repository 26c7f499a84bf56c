"""A run from its first step to its last: the run folder, the warm start, checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.checkpoint import ModelWriter
from foreroute.files.toml import by_key
from foreroute.records import StepRecord, alarms
from foreroute.train.config import TrainConfig
from foreroute.train.experts import make_execution, read_planning
from foreroute.train.folder import RunFolder, as_run_folder_error
from foreroute.train.loop import Trainer, make_trainer
from foreroute.train.policy import make_engine, make_model, make_policy, set_weights
from foreroute.train.prompts import make_task
from foreroute.train.ranks import find_device, join_ranks
from foreroute.train.record import Experience
from foreroute.train.warm_start import warm_start


@dataclass
class Watcher:
    """Callbacks for whoever watches a run. By default they do nothing.

    Attributes:
        on_warm_start: called with step and smoothed loss of each supervised step.
        on_step: called with the record of each finished step and the alarms that are on after it.
        should_stop: asked before each step; when true the state is saved and the run ends.
        on_phase: called when a phase of a step begins, with the step and the phase's name: "rollout", "recompute",
            "measure" or "update".
    """

    on_warm_start: Callable[[int, float], None] = lambda step, loss: None
    on_step: Callable[[StepRecord], None] = lambda record: None
    should_stop: Callable[[], bool] = lambda: False
    on_phase: Callable[[int, str], object] | None = None


def train(config: TrainConfig, folder: Path, *, resume: bool = False, watcher: Watcher | None = None) -> RunFolder:
    """Run or resume a configuration in a folder.

    With `parallel.expert` above 1 every process of the run calls this; rank 0 writes the folder, and all of them read
    it. A resumed run ends with the same bits as one that was never interrupted (on the CPU, with as many threads and
    ranks). Nothing is written before the first checkpoint can be: a run that fails or is stopped in its warm start
    leaves no folder.

    Raises:
        ConfigError: when the model cannot be made or trained as configured, other processes run than configured, or
            a resumed run has recorded more than `rl.steps`.
        DatasetError, FunctionError: when a line of the data, or a reward, is not what it must be.
        RunFolderError: when the folder is not empty, or cannot be resumed.
        EngineError: when the rollout engine cannot be started, or fails.
        DivergedError: when loss, gradients, weights or metrics stop being finite; the checkpoints before stay.
        RankError, TransferError: when another process fails, or is gone; the checkpoints before stay.
    """
    watcher = watcher or Watcher()
    device = find_device(config.device)
    torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    run = RunFolder(folder)
    with join_ranks(config.parallel.expert, config.parallel.timeout_s, device) as ranks, ExitStack() as held:
        ranks.require_same(by_key(config.model_dump()), "Start all of them with the same configuration")
        opened = partial(run.require_begun, config) if resume else run.require_new
        ranks.on_rank_0("opening the run folder", opened)
        task = ranks.on_all("reading the task", lambda: make_task(config))
        ranks.require_same({"the data": task.data_digest}, "Give all of them the same files")
        policy = make_policy(config, task, device)
        # before the warm start, which takes long
        ranks.on_all("reading the topology file", lambda: read_planning(config.parallel, policy.spec))
        engine = held.enter_context(closing(make_engine(config, policy)))
        last = ranks.on_all("looking for the last checkpoint", run.last_checkpoint)
        seen = None if last is None else last.name
        ranks.require_same({"the last checkpoint": seen}, f"Put {folder} on a file system that all of them share")
        # a model of a folder has its weights, unless a checkpoint has others
        if last is None and (config.model.path is None or config.warm_start.checkpoint is not None):
            # rank 0 teaches a whole model alone, since the task is small, and hands its weights to all
            begun, first = [False], dict[str, Tensor]()

            def start() -> None:
                model = policy.model if ranks.size == 1 else make_model(config.model, task, config.seed).to(device)
                begun[0] = warm_start(model, config, task, watcher.on_warm_start, watcher.should_stop)
                first.update(model.state_dict())

            ranks.on_rank_0("the warm start", start)
            if not ranks.max(begun)[0]:
                return run
            if ranks.size > 1:
                set_weights(policy.model, first, ranks)
        execution = held.enter_context(closing(make_execution(config, policy, ranks)))
        trainer = make_trainer(config, task, policy, engine, execution)
        trainer.on_phase = watcher.on_phase
        if last is None:
            ranks.on_rank_0("making the run folder", lambda: run.begin(config))
            _save(trainer, run)
        else:
            state: dict[str, Any] = {"step": 0, "model": {}, "optimizer": {"state": {}}}
            ranks.on_rank_0(f"loading {last}", lambda: state.update(run.load(last, data=task.data_digest)))
            with as_run_folder_error(f"checkpoint {last}"):
                trainer.restore(state)
        _take_steps(trainer, run, watcher)
    return run


def _take_steps(trainer: Trainer, run: RunFolder, watcher: Watcher) -> None:
    config, ranks, saved_at = trainer.config, trainer.execution.ranks, trainer.step
    history: list[StepRecord] = []

    def go_on() -> None:
        history.extend(map(_without_tables, run.go_on_from(trainer.step)))

    ranks.on_rank_0("taking up the metrics", go_on)
    while trainer.step < config.rl.steps and not ranks.max([watcher.should_stop()])[0]:
        write = partial(_write, run, config, watcher, history, *trainer.run_step())
        ranks.on_rank_0(f"writing and showing the metrics of step {trainer.step - 1}", write)
        if trainer.step % config.checkpoint.every == 0:
            _save(trainer, run)
            saved_at = trainer.step
    if trainer.step != saved_at:  # stopped, or ended, between two checkpoints
        _save(trainer, run)
    if trainer.step == config.rl.steps:
        # whole tensors, gathered one at a time, which rank 0 alone keeps
        weights = {name: each.cpu() for name, each in trainer.policy.gather_weights() if ranks.rank == 0}

        def write_model(folder: Path) -> None:
            ModelWriter(trainer.policy.model).write(folder, weights)
            trainer.task.save_tokenizer(folder)

        ranks.on_rank_0("writing the model", lambda: run.save_model(write_model))


def _write(
    run: RunFolder,
    config: TrainConfig,
    watcher: Watcher,
    history: list[StepRecord],
    experience: Experience,
    record: StepRecord | None,
) -> None:
    """Write one step down, with the alarms that are on after it, and show it."""
    assert record is not None, "rank 0 has one"
    history.append(_without_tables(record))
    record = record.model_copy(update={"alarms": alarms(history)})
    if record.step % config.measure.save_trace_every == 0:
        run.save_rollout(record.step, experience.generation)
    run.append(record)
    watcher.on_step(record)


def _without_tables(record: StepRecord) -> StepRecord:
    """Drop what grows with layers and ranks: alarms look at single figures, and the history is kept for a whole run."""
    return record.model_copy(update={"margins_LB": None, "execution": None, "alarms": None})


def _save(trainer: Trainer, run: RunFolder) -> None:
    config, data, ranks = trainer.config, trainer.task.data_digest, trainer.execution.ranks
    state = ranks.on_all("gathering the state", trainer.state)
    ranks.on_rank_0("saving a checkpoint", lambda: run.save_checkpoint(state, data=data, keep=config.checkpoint.keep))
