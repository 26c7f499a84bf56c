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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.adapters.sampling_engine import Engine
from foreroute.errors import AttachError, ConfigError
from foreroute.trace import RoutingTrace
from foreroute.train.ahead import RolloutsAhead
from foreroute.train.config import TrainConfig
from foreroute.train.evaluate import evaluate, evaluation_record
from foreroute.train.measure import StepPart, merged, step_record
from foreroute.train.model import make_model
from foreroute.train.optimizer import make_optimizer
from foreroute.train.precision import checkpointed
from foreroute.train.ranks import Ranks
from foreroute.train.recompute import Recomputed, recompute
from foreroute.train.reference import Reference
from foreroute.train.rollout import Experience, roll_out
from foreroute.train.run_folder import load_checkpoint, misfit_named
from foreroute.train.schedule import Schedule, Stage, make_schedule
from foreroute.train.spread import Spread
from foreroute.train.stored_rollout import restored, stored
from foreroute.train.tasks import Task
from foreroute.train.update import Updated, update
from foreroute.train.whole import Execution, Whole


@dataclass
class Trainer:
    """The state of a run, and whose thread it is that samples rollouts ahead. It is closed by whoever made it.

    Attributes:
        step: the next one.
        skipped_steps: steps of data that were passed over by rollbacks.
        seconds: of the stages of the last step.
        ahead: what samples beside the updates; None where each step samples for itself.
    """

    config: TrainConfig
    task: Task
    policy: hf.RoutedModel
    execution: Execution
    engine: Engine
    optimizer: torch.optim.Optimizer
    reference: Reference | None = None
    step: int = 0
    skipped_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    ahead: RolloutsAhead | None = None

    def __post_init__(self) -> None:
        if self.config.rollout.max_staleness:
            self.ahead = RolloutsAhead(self._sample, self.config.rollout.max_staleness, self.config.threads)

    def close(self) -> None:
        """End the thread of rollouts, if there is one."""
        if self.ahead is not None:
            self.ahead.close()

    def run_step(self) -> tuple[Experience, dict[str, Any]]:
        """One rollout and the update on it.

        Returns:
            The rollout and the step's record, on rank 0 those of all ranks; elsewhere the record is empty.
        """
        self.seconds.clear()
        ranks, version, routing = self.execution.ranks, self.step, self.config.rl.routing
        with self._timed("rollout"):
            experience = self._roll_out()
        evaluation = self._evaluate()
        schedule = make_schedule(experience, self.config.rl, ranks, seed=(self.config.seed, self._data_step))
        follows_rollout = routing in ("R3", "R3+weights")
        if follows_rollout:
            self._plan(experience.generation.trace, [schedule.recompute, *schedule.update])
        trained_with = "replayed" if follows_rollout else "native"
        with self._timed("recompute"):
            passes = {trained_with: self._recompute(experience, schedule, trained_with)}
        if routing == "R2":
            self._plan(passes[trained_with].executed, schedule.update)
        if self._measures:
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
        skipped = {"skipped_prompts": self.task.skipped} if self.task.skipped else {}
        record = step_record(version, whole, trained_with, self.seconds)
        return whole.experience, record | evaluation | execution | skipped

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; randomness follows from the seed and the step."""
        weights = dict(self.execution.state_dict())
        state = {"model": weights, "optimizer": self.execution.optimizer_state(self.optimizer)}
        if self.ahead is None:
            return state
        return state | {"rollouts": {step: stored(each) for step, each in self.ahead.waiting().items()}}

    def restore(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same run.

        Raises:
            RunFolderError: when it is damaged, or of another model.
        """
        state = load_checkpoint(checkpoint)
        with misfit_named(f"checkpoint {checkpoint}"):
            self.execution.load(state["model"], self.optimizer, state["optimizer"])
            if self.ahead is not None:
                self.ahead.restore({step: restored(s, self.policy.spec) for step, s in state["rollouts"].items()})
        self.step = state["step"]

    @property
    def _data_step(self) -> int:
        return self.step + self.skipped_steps

    @property
    def _measures(self) -> bool:
        return self.step % self.config.measure.compare_every == 0

    def weights_for_engine(self) -> Mapping[str, torch.Tensor]:
        weights = self.execution.state_dict()
        return weights if self.config.model.lora.rank == 0 else hf.merged(weights, self.policy.model)

    def _roll_out(self) -> Experience:
        weights, step = self.weights_for_engine(), self.step
        if self.ahead is not None:
            self.ahead.order(step, weights)
            return self.ahead.take(step)
        sample = partial(self._sample, step, step, weights)
        return self.execution.ranks.together(f"the rollout of step {step}", sample)

    def _sample(self, step: int, version: int, weights: Mapping[str, torch.Tensor]) -> Experience:
        self.engine.load_weights(weights, version=version)
        return roll_out(self.engine, self.task, self.config, step + self.skipped_steps, self.execution.ranks)

    def _accepted(self) -> range:
        """The versions that the rollout's routes may be of."""
        return range(max(0, self.step - self.config.rollout.max_staleness), self.step + 1)

    def _evaluate(self) -> dict[str, Any]:
        """With the weights that this step's rollout was sampled with."""
        every, ranks = self.config.evaluation.every, self.execution.ranks
        if not every or self.step % every:
            return {}
        with self._timed("evaluation"):
            evaluated = ranks.together(
                f"the evaluation of step {self.step}",
                lambda: evaluate(self.engine, self.task, self.config, self.step, ranks),
            )
            return evaluation_record(ranks.gathered(evaluated))

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
            accepted=self._accepted(),
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
            accepted=None if self.config.rl.routing == "R2" else self._accepted(),
            reference_logprobs_R=reference_logprobs_R,
            watch_routes=self._measures,
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


def make_policy(config: TrainConfig, task: Task) -> hf.RoutedModel:
    """The model, with initial weights, ready to record and replay.

    Raises:
        ConfigError: when it cannot be had, or has no routers that can be recorded and replayed.
    """
    model = checkpointed(make_model(config.model, task, config.seed), config.model)
    model.train()
    try:
        return hf.attach(model)
    except AttachError as error:
        raise ConfigError(
            f"the model of {config.model.path or config.model.family} cannot be trained: {error}"
        ) from error


def make_execution(config: TrainConfig, policy: hf.RoutedModel, ranks: Ranks) -> Whole | Spread:
    """The policy, whole in one process or its experts spread over all."""
    return Whole(policy) if ranks.size == 1 else Spread(policy, config.parallel, ranks)


def make_trainer(
    config: TrainConfig, task: Task, policy: hf.RoutedModel, execution: Execution, engine: Engine
) -> Trainer:
    """All of these, adapters if there are to be some, and a new optimizer.

    Routers that are to stay as they are get no gradients.
    """
    lora = config.model.lora
    if lora.rank:
        hf.add_lora(policy.model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
        policy = hf.attach(policy.model)
    if lora.rank or config.rl.router == "frozen":
        for parameter in policy.router_parameters():
            parameter.requires_grad_(config.rl.router == "trained")
    optimizer = make_optimizer(policy.model, lr=config.rl.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return Trainer(config, task, policy, execution, engine, optimizer)
