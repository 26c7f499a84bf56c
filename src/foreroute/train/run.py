"""A run from its first step to its last: the run folder, the warm start, checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foreroute.errors import ConfigError, DivergedError, RunFolderError
from foreroute.records import Rollback
from foreroute.train.alarm_actions import (
    AlarmActions,
    as_rolled_back,
    finish_rollback,
    read_rollbacks,
    require_matching_metrics,
)
from foreroute.train.checkpoint import load_checkpoint
from foreroute.train.config import TrainConfig
from foreroute.train.expert_parallel import compile_planner, make_execution
from foreroute.train.loop import Trainer, make_trainer
from foreroute.train.model import load_reference, make_engine, make_policy, write_model
from foreroute.train.ranks import Ranks, find_device, join_ranks, use_device
from foreroute.train.recorder import Recorder, require_loggers
from foreroute.train.rollout import Experience
from foreroute.train.run_folder import RunFolder, by_key, misfit_named
from foreroute.train.tasks import Task, make_task
from foreroute.train.warm_start import warm_start


@dataclass
class Watcher:
    """Callbacks for whoever watches a run. The default ones do nothing.

    Attributes:
        on_warm_start: called with step and smoothed loss of each supervised step.
        on_step: called with the record of each finished step.
        should_stop: asked before each step; when true the state is saved and the run ends.
        on_rollback: called when the run has gone back to an earlier checkpoint.
        on_superseded: called with a step that ran again and came out otherwise than it was recorded, and with the
            folder that the earlier records are in.
        on_stage: called when a stage of a step begins, with the step and the stage's name: "rollout", "recompute",
            "update" and such.
    """

    on_warm_start: Callable[[int, float], None] = lambda step, loss: None
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    should_stop: Callable[[], bool] = lambda: False
    on_rollback: Callable[[Rollback], None] = lambda rollback: None
    on_superseded: Callable[[int, Path], None] = lambda step, folder: None
    on_stage: Callable[[int, str], None] = lambda step, stage: None


def train(config: TrainConfig, folder: Path, *, resume: bool = False, watcher: Watcher | None = None) -> RunFolder:
    """Run or resume a configuration in a folder.

    With `parallel.expert` above 1 every process of the run calls this; rank 0 writes the folder, and all of them read
    it. A resumed run ends with the same bits as one that was never interrupted (on the CPU, with as many threads and
    ranks). Nothing is written before the first checkpoint can be: a run that fails or is stopped in its warm start
    leaves no folder.

    Raises:
        ConfigError: when the model cannot be made or trained as configured, or other processes run than configured.
        RunFolderError: when the folder is in use, or cannot be resumed.
        EngineError: when the rollout engine cannot be started, or fails.
        DivergedError: when loss, gradients or probabilities stop being finite; the checkpoints before stay.
        CollapseError: when an alarm ends the run; likewise.
        RankError, TransferError: when another process fails, or is gone; the checkpoints before stay.
    """
    watcher = watcher or Watcher()
    device = find_device(config.device)
    use_device(device, config.threads)
    run = RunFolder(folder, config)
    with join_ranks(config.parallel.expert, config.parallel.timeout_s, device) as ranks, ExitStack() as held:
        ranks.require_same(by_key(config.model_dump()), "Start all of them with the same configuration")
        ranks.on_rank_0("opening the run folder", lambda: _open(config, run, held, resume=resume))
        with closing(ranks.on_all("reading the task", lambda: make_task(config))) as task:
            ranks.require_same({"the data": task.data_digest}, "Give all of them the same files")
            while _run_from_last_checkpoint(config, task, run, ranks, watcher, device, resume=resume):
                if ranks.rank == 0:
                    watcher.on_rollback(read_rollbacks(run)[-1])
    return run


def _run_from_last_checkpoint(
    config: TrainConfig,
    task: Task,
    run: RunFolder,
    ranks: Ranks,
    watcher: Watcher,
    device: torch.device,
    *,
    resume: bool,
) -> bool:
    """Run from the last checkpoint to the end, or to a rollback; True after a rollback."""
    rollbacks = read_rollbacks(run)
    config = as_rolled_back(config, rollbacks)
    policy = make_policy(config, task, device)
    if policy.spec.num_experts % ranks.size:  # before the warm start, which takes long
        raise ConfigError(
            f"the model's {policy.spec.num_experts} experts cannot be dealt to parallel.expert = {ranks.size} evenly"
        )
    with closing(make_engine(config, policy)) as engine:
        last = _last_checkpoint(run, ranks)
        if last is None and not _begin(policy.model, config, task, ranks, watcher):
            return False
        with (
            closing(make_execution(config, policy, ranks)) as execution,
            closing(make_trainer(config, task, policy, execution, engine)) as trainer,
        ):
            trainer.skipped_steps = rollbacks[-1].skipped_steps if rollbacks else 0
            trainer.on_stage = watcher.on_stage
            _start(trainer, run, last, resume=resume)
            return _run(trainer, run, watcher)


def _open(config: TrainConfig, run: RunFolder, held: ExitStack, *, resume: bool) -> None:
    require_loggers(config.logging)
    if not resume:
        run.require_new()
        held.enter_context(run.held())
        run.require_new()
        return
    run.require_begun()
    held.enter_context(run.held())
    finish_rollback(run)
    require_matching_metrics(run)


def _last_checkpoint(run: RunFolder, ranks: Ranks) -> Path | None:
    """Find the last checkpoint, which must be the same on all ranks.

    Raises:
        RunFolderError: when there is none, and steps were recorded.
    """
    last = ranks.on_all("looking for the last checkpoint", run.last_checkpoint)
    seen = None if last is None else last.name
    ranks.require_same({"the last checkpoint": seen}, f"Put {run.path} on a file system that all of them share")
    if last is None:
        ranks.on_rank_0("looking for metrics without a checkpoint", lambda: _require_nothing_recorded(run))
    return last


def _require_nothing_recorded(run: RunFolder) -> None:
    if recorded := len(run.metrics.records()):
        raise RunFolderError(
            f"{run.path} has the records of {recorded} steps and no checkpoint to go on from. Restore one from a copy, "
            "or start in another folder"
        )


def _begin(model: Any, config: TrainConfig, task: Task, ranks: Ranks, watcher: Watcher) -> bool:
    """Have rank 0 make the weights that RL starts from; False when it was stopped meanwhile."""
    begun = []

    def work() -> None:
        if ranks.rank == 0:
            begun.append(_warm_start(model, config, task, watcher))
        elif ranks.rank == 1:
            # all ranks need the kernels next, and would compile them side by side
            compile_planner(config.parallel)

    ranks.on_all("the warm start", work)
    ranks.broadcast(model.state_dict())
    return bool(ranks.max([begun == [True]])[0])


def _start(trainer: Trainer, run: RunFolder, last: Path | None, *, resume: bool) -> None:
    ranks, digest = trainer.execution.ranks, trainer.task.data_digest
    if last is not None:
        ranks.on_rank_0("comparing the data", lambda: run.bind_data(digest, begun=True))
        checkpoint = ranks.on_all(f"loading {last}", lambda: run.load(last))
        ranks.on_all(f"taking up {last}", lambda: trainer.restore(checkpoint.state, f"checkpoint {last}"))
        ranks.on_rank_0("taking up the metrics", lambda: run.metrics.take_up(trainer.step, checkpoint.metrics))
    else:
        # a run that was killed before its first checkpoint has a configuration already
        if not resume:
            ranks.on_rank_0("making the run folder", run.begin)
        ranks.on_rank_0("noting the data", lambda: run.bind_data(digest, begun=False))
        _save(trainer, run)
    if trainer.config.rl.kl_coefficient:
        trainer.reference = ranks.on_all(
            "loading the reference", lambda: load_reference(trainer.config, trainer.task, run, trainer.device)
        )


def _run(trainer: Trainer, run: RunFolder, watcher: Watcher) -> bool:
    """Take steps until the run ends; True when it was rolled back."""
    config, ranks = trainer.config, trainer.execution.ranks
    alarm_actions = AlarmActions(config.alarms, run, ranks, trainer.step)
    with closing(Recorder(config, run, alarm_actions)) as recorder:
        ranks.on_rank_0("opening the loggers", lambda: recorder.open(trainer.step))
        return _take_steps(trainer, run, watcher, alarm_actions, recorder)


def _take_steps(
    trainer: Trainer, run: RunFolder, watcher: Watcher, alarm_actions: AlarmActions, recorder: Recorder
) -> bool:
    last, ranks, saved_at = trainer.config.rl.steps, trainer.execution.ranks, trainer.step
    while trainer.step < last and not ranks.max([watcher.should_stop()])[0]:
        step = trainer.step
        try:
            write = partial(_write, recorder, watcher, *trainer.run_step())
            ranks.on_rank_0(f"writing and showing the metrics of step {step}", write)
            # before a checkpoint is saved, so that a run that is killed here comes to the same decision again
            if alarm_actions.act(step):
                return True
            if trainer.step % trainer.config.checkpoint.every == 0 or trainer.step == last:
                _save(trainer, run)
                saved_at = trainer.step
        except DivergedError as error:  # of the step, or of a rollout ahead that a checkpoint waits for
            return alarm_actions.act_on_divergence(step, error)
    if trainer.step != saved_at:
        _save(trainer, run)
    if trainer.step == last:
        _write_model(trainer, run)
    return False


def _write(recorder: Recorder, watcher: Watcher, experience: Experience, record: dict[str, Any]) -> None:
    """Write the record of a step down, and show it."""
    if (aside := recorder.write(experience, record)) is not None:
        watcher.on_superseded(record["step"], aside)
    watcher.on_step(record)


def _save(trainer: Trainer, run: RunFolder) -> None:
    state = trainer.state()
    trainer.execution.ranks.on_rank_0("saving a checkpoint", lambda: run.save_checkpoint(trainer.step, state))


def _write_model(trainer: Trainer, run: RunFolder) -> None:
    weights, model = trainer.weights_for_engine(), trainer.policy.model
    trainer.execution.ranks.on_rank_0(
        "writing the model", lambda: run.save_model(partial(write_model, model, weights, trainer.task))
    )


def _warm_start(model: Any, config: TrainConfig, task: Task, watcher: Watcher) -> bool:
    source = config.warm_start.checkpoint
    if source is None and config.warm_start.max_steps == 0:
        return True
    if source is None:
        return warm_start(model, config, task, watcher.on_warm_start, watcher.should_stop)
    weights = load_checkpoint(Path(source))["model"]
    with misfit_named(f"warm_start.checkpoint {source}"):
        model.load_state_dict(weights)
    return True
