"""The trainer, from top to bottom: rollout, recompute, update.

    engine (another copy, lower precision)            trainer (float32)
    ┌──────────────────────────────┐  tokens, routes  ┌─────────────────────────┐   ┌────────────────────────┐
    │ 1 roll_out: sample, record   │ ───────────────▶ │ 2 recompute: old        │ ─▶│ 3 update: new log-probs,│
    │   routes and log-probs       │                  │   log-probs             │   │   gradients, step       │
    └──────────────▲───────────────┘                  └─────────────────────────┘   └───────────┬────────────┘
                   └──────────────────────── weights, version + 1 ──────────────────────────────┘

`rl.routing` decides whose experts stages 2 and 3 use:  none, the trainer's own in each forward;  R2, those of stage 2
again in stage 3;  R3, those of stage 1 in both;  R3+weights, those of stage 1 with the gate weights they had there.
What stage 3 minimises is in `objective/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.errors import ConfigError, ForerouteError, RunFolderError
from foreroute.trace import RoutingTrace
from foreroute.train.config import TrainConfig
from foreroute.train.engines import make_engine
from foreroute.train.measure import StepPart, merged, step_record
from foreroute.train.ranks import Ranks, joined
from foreroute.train.recompute import Recomputed, recompute
from foreroute.train.reference import Reference, load_reference, make_model
from foreroute.train.rollout import Engine, Experience, roll_out
from foreroute.train.run_folder import RunFolder, load_checkpoint
from foreroute.train.schedule import Schedule, Stage, make_schedule
from foreroute.train.spread import Spread, compile_planner
from foreroute.train.update import Updated, update
from foreroute.train.warm_start import warm_start
from foreroute.train.whole import Execution, Whole


@dataclass
class Watcher:
    """What someone who watches a run is told. The default tells nobody.

    Attributes:
        on_warm_start: called with step and smoothed loss of each supervised step.
        on_step: called with the record of each finished step.
        should_stop: asked before each step; when true the state is saved and the run ends.
    """

    on_warm_start: Callable[[int, float], None] = lambda step, loss: None
    on_step: Callable[[dict[str, Any]], None] = lambda record: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass
class Trainer:
    """The state of a run."""

    config: TrainConfig
    policy: hf.RoutedModel
    execution: Execution
    engine: Engine
    optimizer: torch.optim.Optimizer
    reference: Reference | None = None
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def run_step(self) -> tuple[Experience, dict[str, Any]]:
        """One rollout and the update on it.

        Returns:
            The rollout and the step's record, on rank 0 those of all ranks; elsewhere the record is empty.
        """
        self.seconds.clear()
        ranks, version, routing = self.execution.ranks, self.step, self.config.rl.routing
        with self._timed("rollout"):
            weights = self.execution.state_dict()
            experience = ranks.together(f"the rollout of step {version}", lambda: self._roll_out(weights))
        schedule = make_schedule(experience, self.config.rl, ranks, seed=(self.config.seed, version))
        follows_rollout = routing in ("R3", "R3+weights")
        if follows_rollout:
            self._plan(experience.generation.trace, [schedule.recompute, *schedule.update])
        trained_with = "replayed" if follows_rollout else "native"
        with self._timed("recompute"):
            passes = {trained_with: self._recompute(experience, schedule, trained_with)}
        if routing == "R2":
            self._plan(passes[trained_with].executed, schedule.update)
        if version % self.config.measure.compare_every == 0:
            other = "native" if trained_with == "replayed" else "replayed"
            with self._timed("measure"):
                passes[other] = self._recompute(experience, schedule, other)
        reference_R = None
        if self.reference is not None:
            with self._timed("reference"):
                temperature = self.config.rollout.temperature
                reference_R = self.reference.logprobs_R(experience.generation, schedule.recompute, temperature)
        with self._timed("update"):
            updated = self._update(experience, schedule, passes[trained_with], reference_R)
        self.step += 1
        execution = self.execution.record()
        parts = ranks.gathered(StepPart(experience, passes, updated))
        if not parts:
            return experience, {}
        whole = merged(parts)
        return whole.experience, step_record(version, whole, trained_with, self.seconds) | execution

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; randomness follows from the seed and the step."""
        weights = dict(self.execution.state_dict())
        return {"model": weights, "optimizer": self.execution.optimizer_state(self.optimizer)}

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same run.

        Raises:
            RunFolderError: when it is damaged, or of another model.
        """
        state = load_checkpoint(checkpoint)
        with _misfit_named(f"checkpoint {checkpoint}"):
            self.execution.load(state["model"], self.optimizer, state["optimizer"])
        self.step = state["step"]

    def _roll_out(self, weights: Mapping[str, torch.Tensor]) -> Experience:
        self.engine.load_weights(weights, version=self.step)
        return roll_out(self.engine, self.config, self.step, self.execution.ranks)

    def _plan(self, routes: RoutingTrace, stages: list[Stage]) -> None:
        self.execution.plan(self.step * self.config.rl.mini_steps, routes, stages)

    def _recompute(self, experience: Experience, schedule: Schedule, routes: str) -> Recomputed:
        return recompute(
            self.policy,
            self.execution,
            experience.generation,
            schedule.recompute,
            temperature=self.config.rollout.temperature,
            replay=routes == "replayed",
            weight_version=self.step,
            gate_weights=routes == "replayed" and self.config.rl.routing == "R3+weights",
        )

    def _update(
        self,
        experience: Experience,
        schedule: Schedule,
        recomputed: Recomputed,
        reference_logprobs_R: NDArray[np.float32] | None,
    ) -> Updated:
        self._set_learning_rate()
        rollout = experience.generation.trace
        routes = {"none": None, "R2": recomputed.executed, "R3": rollout, "R3+weights": rollout}
        return update(
            self.policy,
            self.execution,
            self.optimizer,
            experience,
            schedule.update,
            recomputed.logprobs_R,
            routes[self.config.rl.routing],
            self.config.rl,
            weight_version=self.step,
            temperature=self.config.rollout.temperature,
            reference_logprobs_R=reference_logprobs_R,
        )

    def _set_learning_rate(self) -> None:
        settings = self.config.rl
        share = min(1.0, (self.step + 1) / (settings.warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * share

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start


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
        RankError, TransferError: when another process fails, or is gone; the checkpoints before stay.
    """
    watcher = watcher or Watcher()
    torch.set_num_threads(config.threads)
    with joined(config.parallel.expert, config.parallel.timeout_s) as ranks:
        ranks.require_same(_by_key(config.model_dump()), "Start all of them with the same configuration")
        ranks.first("opening the run folder", lambda: _open(config, folder, resume))
        run = RunFolder(folder)
        policy = make_policy(config)
        _require_divisible(policy, ranks)
        with closing(make_engine(config, policy)) as engine:
            last = _last_checkpoint(run, ranks)
            if last is None and not _begin(policy.model, config, ranks, watcher):
                return run
            with closing(make_execution(config, policy, ranks)) as execution:
                trainer = make_trainer(config, policy, execution, engine)
                _start(trainer, run, last)
                _run(trainer, run, watcher)
    return run


def _by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _by_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _open(config: TrainConfig, folder: Path, resume: bool) -> None:
    if resume:
        RunFolder.reopen(folder, config)
    else:
        RunFolder.claim(folder)


def _require_divisible(policy: hf.RoutedModel, ranks: Ranks) -> None:
    """Before the warm start, which takes long."""
    if policy.spec.num_experts % ranks.size:
        raise ConfigError(
            f"the model's {policy.spec.num_experts} experts cannot be dealt to parallel.expert = {ranks.size} evenly"
        )


def _last_checkpoint(run: RunFolder, ranks: Ranks) -> Path | None:
    """The same on all ranks."""
    last = run.last_checkpoint()
    seen = None if last is None else last.name
    ranks.require_same({"the last checkpoint": seen}, f"Put {run.path} on a file system that all of them share")
    return last


def _begin(model: Any, config: TrainConfig, ranks: Ranks, watcher: Watcher) -> bool:
    """The weights that RL starts from, made by rank 0. False when it was stopped meanwhile."""
    begun = []

    def work() -> None:
        if ranks.rank == 0:
            begun.append(_warm_start(model, config, watcher))
        elif ranks.rank == 1:
            # all ranks need the kernels next, and would compile them side by side
            compile_planner(config.parallel)

    ranks.together("the warm start", work)
    ranks.copy_from_first(model.state_dict())
    return bool(ranks.most([begun == [True]])[0])


def _start(trainer: Trainer, run: RunFolder, last: Path | None) -> None:
    ranks = trainer.execution.ranks
    if last is not None:
        ranks.together(f"loading {last}", lambda: trainer.restore(last))
        ranks.first("taking up the metrics", lambda: run.forget_metrics_from(trainer.step))
    else:
        ranks.first("making the run folder", lambda: run.begin(trainer.config))
        _save(trainer, run)
    if trainer.config.rl.kl_coefficient:
        trainer.reference = ranks.together("loading the reference", lambda: load_reference(trainer.config.model, run))


def _run(trainer: Trainer, run: RunFolder, watcher: Watcher) -> None:
    config, ranks, saved_at = trainer.config, trainer.execution.ranks, trainer.step
    while trainer.step < config.rl.steps and not ranks.most([watcher.should_stop()])[0]:
        step = trainer.step
        experience, record = trainer.run_step()
        ranks.first(f"writing the metrics of step {step}", partial(_write, run, config, step, experience, record))
        if record:
            watcher.on_step(record)
        if trainer.step % config.checkpoint.every == 0:
            _save(trainer, run)
            saved_at = trainer.step
    if trainer.step != saved_at:
        _save(trainer, run)


def _write(run: RunFolder, config: TrainConfig, step: int, experience: Experience, record: dict[str, Any]) -> None:
    if step % config.measure.save_trace_every == 0:
        run.save_trace(step, experience.generation.trace.without_gate_weights())
    run.append_metrics(record)


def _save(trainer: Trainer, run: RunFolder) -> None:
    state = trainer.state()
    trainer.execution.ranks.first("saving a checkpoint", lambda: run.save_checkpoint(trainer.step, state))


def make_policy(config: TrainConfig) -> hf.RoutedModel:
    """The model, with initial weights, ready to record and replay."""
    model = make_model(config.model, config.seed)
    model.train()
    return hf.attach(model)


def make_execution(config: TrainConfig, policy: hf.RoutedModel, ranks: Ranks) -> Whole | Spread:
    """The policy, whole in one process or its experts spread over all."""
    return Whole(policy) if ranks.size == 1 else Spread(policy, config.parallel, ranks)


def make_trainer(config: TrainConfig, policy: hf.RoutedModel, execution: Execution, engine: Engine) -> Trainer:
    """All of these, and a new optimizer. Routers that are to stay as they are lose their gradients."""
    if config.rl.router == "frozen":
        for parameter in policy.router_parameters():
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=config.rl.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    return Trainer(config, policy, execution, engine, optimizer)


def _warm_start(model: Any, config: TrainConfig, watcher: Watcher) -> bool:
    source = config.warm_start.checkpoint
    if source is None:
        return warm_start(model, config, watcher.on_warm_start, watcher.should_stop)
    if not Path(source).is_file():
        raise RunFolderError(f"warm_start.checkpoint {source} does not exist")
    with _misfit_named(f"warm_start.checkpoint {source}"):
        model.load_state_dict(load_checkpoint(Path(source))["model"])
    return True


@contextmanager
def _misfit_named(what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, ForerouteError):
            raise
        raise RunFolderError(f"{what} does not fit this model and optimizer: {error}") from error
