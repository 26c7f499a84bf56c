"""A run from its first step to its last: the run folder, the warm start, checkpoints and resuming."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError, RunFolderError
from foreroute.train.config import TrainConfig
from foreroute.train.expert_parallel import make_execution
from foreroute.train.loop import Trainer, make_trainer
from foreroute.train.model import load_reference, make_engine, make_policy, write_model
from foreroute.train.ranks import Ranks, find_device, join_ranks, use_device
from foreroute.train.recorder import Recorder, require_loggers
from foreroute.train.rollout import Experience
from foreroute.train.run_folder import RunFolder, by_key
from foreroute.train.stage_planner import Planning, compile_planner, read_planning
from foreroute.train.tasks import Task, make_task
from foreroute.train.warm_start import warm_start


@dataclass
class Watcher:
    """Callbacks for whoever watches a run. The default ones do nothing.

    Attributes:
        on_warm_start: called with step and smoothed loss of each supervised step.
        on_step: called with the record of each finished step.
        should_stop: asked before each step; when true the state is saved and the run ends.
        on_superseded: called with a step that ran again and came out otherwise than it was recorded, and with the
            file that the earlier records are in.
        on_stage: called when a stage of a step begins, with the step and the stage's name: "rollout", "recompute",
            "update" and such.
    """

    on_warm_start: Callable[[int, float], None] = lambda step, loss: None
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    should_stop: Callable[[], bool] = lambda: False
    on_superseded: Callable[[int, Path], None] = lambda step, file: None
    on_stage: Callable[[int, str], None] = lambda step, stage: None


def train(config: TrainConfig, folder: Path, *, resume: bool = False, watcher: Watcher | None = None) -> RunFolder:
    """Run or resume a configuration in a folder.

    With `parallel.expert` above 1 every process of the run calls this; rank 0 writes the folder, and all of them read
    it. A resumed run ends with the same bits as one that was never interrupted (on the CPU, with as many threads and
    ranks). Nothing is written before the first checkpoint can be: a run that fails or is stopped in its warm start
    leaves no folder.

    Raises:
        ConfigError: when the model cannot be made or trained as configured, other processes run than configured, or
            a resumed run has recorded more than `rl.steps`.
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
        ranks.on_rank_0("opening the run folder", lambda: _open(run, config, held, resume=resume))
        task = held.enter_context(closing(ranks.on_all("reading the task", lambda: make_task(config))))
        ranks.require_same({"the data": task.data_digest}, "Give all of them the same files")
        policy = make_policy(config, task, device)
        if policy.spec.num_experts % ranks.size:  # before the warm start, which takes long
            raise ConfigError(
                f"the model's {policy.spec.num_experts} experts cannot be dealt to parallel.expert = {ranks.size} "
                "evenly"
            )
        planning = ranks.on_all("reading the topology file", lambda: read_planning(config.parallel, policy.spec))
        engine = held.enter_context(closing(make_engine(config, policy)))
        last = _last_checkpoint(run, ranks)
        if last is None and not _warm_started(policy.model, config, task, planning, ranks, watcher):
            return run
        execution = held.enter_context(closing(make_execution(config, policy, ranks)))
        trainer = held.enter_context(closing(make_trainer(config, task, policy, execution, engine)))
        trainer.on_stage = watcher.on_stage
        if last is None:
            _begin(trainer, run, resume=resume)
        else:
            _take_up(trainer, run, last)
        if config.rl.kl_coefficient:
            trainer.reference = ranks.on_all(
                "loading the reference", lambda: load_reference(config, task, run, trainer.device)
            )
        recorder = held.enter_context(closing(Recorder(config, run)))
        ranks.on_rank_0("opening the loggers", lambda: recorder.open(trainer.step))
        _take_steps(trainer, run, watcher, recorder)
    return run


def _open(run: RunFolder, config: TrainConfig, held: ExitStack, *, resume: bool) -> None:
    require_loggers(config.logging)
    require = run.require_begun if resume else run.require_new
    require()
    held.enter_context(run.held())
    require()  # nobody else changes it from here on
    if (recorded := len(run.metrics.records()) if resume else 0) > config.rl.steps:
        raise ConfigError(
            f"rl.steps = {config.rl.steps} is fewer than the {recorded} steps that {run.path} has recorded; "
            f"give {recorded} or more, or start in another folder"
        )


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


def _warm_started(
    model: Any, config: TrainConfig, task: Task, planning: Planning, ranks: Ranks, watcher: Watcher
) -> bool:
    """Have rank 0 make the weights that RL starts from; False when it was stopped meanwhile."""
    begun = []

    def work() -> None:
        if ranks.rank == 0:
            begun.append(warm_start(model, config, task, watcher.on_warm_start, watcher.should_stop))
        elif ranks.rank == 1:
            # all ranks need the kernels next, and would compile them side by side
            compile_planner(planning)

    ranks.on_all("the warm start", work)
    ranks.broadcast(model.state_dict())
    return bool(ranks.max([begun == [True]])[0])


def _begin(trainer: Trainer, run: RunFolder, *, resume: bool) -> None:
    ranks = trainer.execution.ranks
    # a run that was killed before its first checkpoint has a configuration already
    if not resume:
        ranks.on_rank_0("making the run folder", run.begin)
    ranks.on_rank_0("noting the data", lambda: run.bind_data(trainer.task.data_digest, begun=False))
    _save(trainer, run)


def _take_up(trainer: Trainer, run: RunFolder, last: Path) -> None:
    ranks = trainer.execution.ranks
    ranks.on_rank_0("comparing the data", lambda: run.bind_data(trainer.task.data_digest, begun=True))
    checkpoint = ranks.on_all(f"loading {last}", lambda: run.load(last))
    ranks.on_all(f"taking up {last}", lambda: trainer.restore(checkpoint.state, f"checkpoint {last}"))
    ranks.on_rank_0("taking up the metrics", lambda: run.metrics.take_up(trainer.step, checkpoint.metrics))


def _take_steps(trainer: Trainer, run: RunFolder, watcher: Watcher, recorder: Recorder) -> None:
    config, ranks, saved_at = trainer.config, trainer.execution.ranks, trainer.step
    while trainer.step < config.rl.steps and not ranks.max([watcher.should_stop()])[0]:
        write = partial(_write, recorder, watcher, *trainer.run_step())
        ranks.on_rank_0(f"writing and showing the metrics of step {trainer.step - 1}", write)
        if trainer.step % config.checkpoint.every == 0:
            _save(trainer, run)
            saved_at = trainer.step
    if trainer.step != saved_at:
        _save(trainer, run)
    if trainer.step == config.rl.steps:
        model, weights = trainer.policy.model, trainer.weights_for_engine()
        write_files = partial(write_model, model, weights, trainer.task)
        ranks.on_rank_0("writing the model", lambda: run.save_model(write_files))


def _write(recorder: Recorder, watcher: Watcher, experience: Experience, record: dict[str, Any]) -> None:
    """Write the record of a step down, show it, and act on its alarms."""
    if (aside := recorder.write(experience, record)) is not None:
        watcher.on_superseded(record["step"], aside)
    watcher.on_step(record)
    recorder.stop_if_told(record)


def _save(trainer: Trainer, run: RunFolder) -> None:
    state = trainer.state()
    trainer.execution.ranks.on_rank_0("saving a checkpoint", lambda: run.save_checkpoint(trainer.step, state))
