"""The trainer, from top to bottom: rollout, recompute, update.

    engine (another copy, lower precision)            trainer (float32)
    ┌──────────────────────────────┐  tokens, routes  ┌─────────────────────────┐   ┌────────────────────────┐
    │ 1 roll_out: sample, record   │ ───────────────▶ │ 2 recompute: old        │ ─▶│ 3 update: new log-probs,│
    │   routes and log-probs       │                  │   log-probs             │   │   gradients, step       │
    └──────────────▲───────────────┘                  └─────────────────────────┘   └───────────┬────────────┘
                   └──────────────────────── weights, version + 1 ──────────────────────────────┘

`rl.routing` decides whose experts stages 2 and 3 use:  none, the trainer's own in each forward;  R2, those of stage 2
again in stage 3;  R3, those of stage 1 in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foreroute.adapters import hf
from foreroute.errors import ForerouteError, RunFolderError
from foreroute.train.config import TrainConfig
from foreroute.train.engines import make_engine
from foreroute.train.measure import step_record
from foreroute.train.recompute import Recomputed, recompute
from foreroute.train.rollout import Engine, Experience, roll_out
from foreroute.train.run_folder import RunFolder, load_checkpoint
from foreroute.train.task import VOCABULARY
from foreroute.train.update import update
from foreroute.train.warm_start import warm_start


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
    engine: Engine
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def run_step(self) -> tuple[Experience, dict[str, Any]]:
        """One rollout and the update on it. Returns the rollout and the step's record."""
        self.seconds.clear()
        with self._timed("rollout"):
            self.engine.load_weights(self.policy.model.state_dict(), version=self.step)
            experience = roll_out(self.engine, self.config, self.step)
        trained_with = "replayed" if self.config.rl.routing == "R3" else "native"
        with self._timed("recompute"):
            passes = {trained_with: self._recompute(experience, trained_with)}
        if self.step % self.config.measure.compare_every == 0:
            other = "native" if trained_with == "replayed" else "replayed"
            with self._timed("measure"):
                passes[other] = self._recompute(experience, other)
        with self._timed("update"):
            self._set_learning_rate()
            updated = update(
                self.policy,
                self.optimizer,
                experience,
                passes[trained_with].logprobs_R,
                {"none": None, "R2": passes[trained_with].executed, "R3": experience.generation.trace}[
                    self.config.rl.routing
                ],
                self.config.rl,
                seed=(self.config.seed, self.step),
                weight_version=self.step,
                temperature=self.config.rollout.temperature,
            )
        record = step_record(self.step, experience, passes, trained_with, updated, self.seconds)
        self.step += 1
        return experience, record

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; randomness follows from the seed and the step."""
        return {"model": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same run.

        Raises:
            RunFolderError: when it is damaged, or of another model.
        """
        state = load_checkpoint(checkpoint)
        with _misfit_named(f"checkpoint {checkpoint}"):
            self.policy.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _recompute(self, experience: Experience, routes: str) -> Recomputed:
        return recompute(
            self.policy,
            experience.generation,
            micro_step_tokens=self.config.rl.micro_step_tokens,
            temperature=self.config.rollout.temperature,
            replay=routes == "replayed",
            weight_version=self.step,
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

    A resumed run ends with the same bits as one that was never interrupted (on the CPU, with as many threads). Nothing
    is written before the first checkpoint can be: a run that fails or is stopped in its warm start leaves no folder.

    Raises:
        ConfigError: when the model cannot be made or trained as configured.
        RunFolderError: when the folder is in use, or cannot be resumed.
        EngineError: when the rollout engine cannot be started, or fails.
        DivergedError: when loss, gradients or probabilities stop being finite; the checkpoints before stay.
    """
    watcher = watcher or Watcher()
    torch.set_num_threads(config.threads)
    run = RunFolder.reopen(folder, config) if resume else RunFolder.claim(folder)
    policy = make_policy(config)
    with closing(make_engine(config.rollout, policy)) as engine:
        trainer = make_trainer(config, policy, engine)
        last = run.last_checkpoint()
        if last is not None:
            trainer.restore(last)
            run.forget_metrics_from(trainer.step)
        elif _warm_start(policy.model, config, watcher):
            run.begin(config)
            run.save_checkpoint(0, trainer.state())
        else:
            return run
        _run(trainer, run, watcher)
    return run


def _run(trainer: Trainer, run: RunFolder, watcher: Watcher) -> None:
    config, saved_at = trainer.config, trainer.step
    while trainer.step < config.rl.steps and not watcher.should_stop():
        step = trainer.step
        experience, record = trainer.run_step()
        if step % config.measure.save_trace_every == 0:
            run.save_trace(step, experience.generation.trace)
        run.append_metrics(record)
        watcher.on_step(record)
        if trainer.step % config.checkpoint.every == 0:
            run.save_checkpoint(trainer.step, trainer.state())
            saved_at = trainer.step
    if trainer.step != saved_at:
        run.save_checkpoint(trainer.step, trainer.state())


def make_policy(config: TrainConfig) -> hf.RoutedModel:
    """The model, with initial weights, ready to record and replay."""
    model: Any = hf.build_model(
        config.model.family,
        seed=config.seed,
        experts_implementation=config.model.experts_implementation,
        **{**config.model.sizes, "vocab_size": len(VOCABULARY)},
    )
    model.train()
    return hf.attach(model)


def make_trainer(config: TrainConfig, policy: hf.RoutedModel, engine: Engine) -> Trainer:
    """Policy, engine and a new optimizer."""
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=config.rl.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    return Trainer(config, policy, engine, optimizer)


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
