"""The trainer, from top to bottom: rollout, recompute, update.

    engine (another copy, lower precision)            trainer (float32)
    ┌──────────────────────────────┐  tokens, routes  ┌─────────────────────────┐   ┌────────────────────────┐
    │ 1 roll_out: sample, record   │ ───────────────▶ │ 2 recompute: old        │ ─▶│ 3 update: new log-probs,│
    │   routes and log-probs       │                  │   log-probs             │   │   gradients, step       │
    └──────────────▲───────────────┘                  └─────────────────────────┘   └───────────┬────────────┘
                   └──────────────────────── weights, version + 1 ──────────────────────────────┘

`rl.routing` decides whose experts stages 2 and 3 use:  none, the trainer's own in each forward;  R2, those of stage 2
again in stage 3;  R3, those of stage 1 in both;  R3+weights, those of stage 1 with the gate weights they had there. So
it does whose choices the indexers of sparse attention make, where the model has some.
A step is read in `rollout.py`, `passes.py`, `update.py` and `objective.py` (what stage 3 minimises); `measure.py` makes
its record, `ranks.py` is what processes tell each other, and a task is a file of `tasks/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.engines.base import Engine
from foreroute.records import Side, to_json
from foreroute.train.async_rollout import AsyncRollouts
from foreroute.train.config import TrainConfig
from foreroute.train.measure import StepPart, device_record, memory_peak, merged, reset_memory_peak, step_record
from foreroute.train.model import Reference, trainable
from foreroute.train.optimizer import make_optimizer
from foreroute.train.passes import PolicyExecution, Recomputed, Schedule, make_schedule, recompute
from foreroute.train.rollout import Experience, evaluate, evaluation_record, roll_out
from foreroute.train.run_folder import misfit_named
from foreroute.train.tasks import Task
from foreroute.train.update import Updated, update


@dataclass
class Trainer:
    """A trainer is the state of a run, and owns the thread of asynchronous rollouts. Whoever makes it closes it.

    Attributes:
        step: the next step.
        seconds: how long each stage of the last step took, by its name.
        async_rollouts: samples beside the updates; None where each step samples for itself.
        on_stage: called when a stage begins, with the step and the stage's name.
    """

    config: TrainConfig
    task: Task
    policy: hf.RoutedTransformer
    execution: PolicyExecution
    engine: Engine
    optimizer: torch.optim.Optimizer
    reference: Reference | None = None
    step: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    async_rollouts: AsyncRollouts | None = None
    on_stage: Callable[[int, str], None] = lambda step, stage: None

    def __post_init__(self) -> None:
        if self.config.rollout.max_staleness:
            staleness, threads = self.config.rollout.max_staleness, self.config.threads
            self.async_rollouts = AsyncRollouts(self._sample, staleness, threads, self.device)

    @property
    def device(self) -> torch.device:
        """The device that the policy is on."""
        return next(self.policy.model.parameters()).device

    def close(self) -> None:
        """End the thread of rollouts, if there is one."""
        if self.async_rollouts is not None:
            self.async_rollouts.close()

    def run_step(self) -> tuple[Experience, dict[str, Any]]:
        """Sample one rollout and take the update on it.

        Returns:
            The rollout and the step's record, on rank 0 those of all ranks; elsewhere the record is empty.
        """
        self.seconds.clear()
        reset_memory_peak(self.device)
        rl, step, ranks = self.config.rl, self.step, self.execution.ranks
        with self._timed("rollout"):
            experience = self._roll_out()
        evaluation = self._evaluate()
        schedule = make_schedule(experience, rl, ranks, seed=(self.config.seed, step))

        # under R3 all stages replay the rollout's routes, so all are planned, in a thread, while the first runs; under
        # R2 the update's routes are known after recompute
        trains_with: Side = "replayed" if rl.routing in ("R3", "R3+weights") else "native"
        steps_taken = step * rl.mini_steps  # of the optimizer, one per mini-batch; they number the weights
        if trains_with == "replayed":
            stages = [schedule.recompute, *schedule.update]
            self.execution.plan(steps_taken, experience.generation.trace, stages, self.optimizer)
        with self._timed("recompute"):
            passes = {trains_with: self._recompute(experience, schedule, trains_with)}
        if rl.routing == "R2":
            self.execution.plan(steps_taken, passes[trains_with].executed, schedule.update, self.optimizer)
        if self._measures:
            other: Side = "native" if trains_with == "replayed" else "replayed"
            with self._timed("measure"):
                passes[other] = self._recompute(experience, schedule, other)
        reference_R = None
        if self.reference is not None:
            with self._timed("reference"):
                temperature = self.config.rollout.temperature
                reference_R = self.reference.logprobs_R(experience.generation, schedule.recompute, temperature)
        with self._timed("update"):
            updated = self._update(experience, schedule, passes[trains_with], reference_R)

        self.step += 1
        execution = self.execution.record()
        (most_bytes,) = ranks.max([memory_peak(self.device)])
        # rank 0 writes the step's record; the others have nothing more to say about it
        parts = ranks.gather(StepPart(experience, passes, updated))
        if not parts:
            return experience, {}
        whole = merged(parts)
        device = device_record(self.device, int(most_bytes))
        record = to_json(replace(step_record(step, whole, trains_with, self.seconds), device=device))
        record |= evaluation | execution
        return whole.experience, record | ({"skipped_prompts": self.task.skipped} if self.task.skipped else {})

    def state(self) -> dict[str, Any]:
        """Give everything that a resumed run needs; randomness follows from the seed and the step."""
        optimizer = self.execution.optimizer_state(self.optimizer)
        waiting = {} if self.async_rollouts is None else {"rollouts": self.async_rollouts.state()}
        home_LE = self.execution.home_LE()
        homes = {} if home_LE is None else {"homes": torch.from_numpy(home_LE)}
        return {"model": dict(self.execution.state_dict()), "optimizer": optimizer} | homes | waiting

    def restore(self, state: Mapping[str, Any], name: str = "the checkpoint") -> None:
        """Continue from a checkpoint of the same run.

        Args:
            state: as `load_checkpoint` gave it.
            name: of the checkpoint, for errors.

        Raises:
            RunFolderError: when it is of another model.
        """
        with misfit_named(name):
            if "homes" in state:
                self.execution.move_homes(state["homes"].numpy(), self.optimizer)
            self.execution.load(state["model"], self.optimizer, state["optimizer"])
            self.step = state["step"]
            if self.async_rollouts is not None:
                self.async_rollouts.restore(state["rollouts"], self.policy.spec)

    @property
    def _measures(self) -> bool:
        return self.step % self.config.measure.compare_every == 0

    def weights_for_engine(self) -> Mapping[str, torch.Tensor]:
        weights = self.execution.state_dict()
        return weights if self.config.model.lora.rank == 0 else hf.merged(weights, self.policy.model)

    def _roll_out(self) -> Experience:
        weights, step = self.weights_for_engine(), self.step
        if self.async_rollouts is not None:
            self.async_rollouts.order(step, weights)
            return self.async_rollouts.take(step)
        sample = partial(self._sample, step, step, weights)
        return self.execution.ranks.on_all(f"the rollout of step {step}", sample)

    def _sample(self, step: int, version: int, weights: Mapping[str, torch.Tensor]) -> Experience:
        self.engine.load_weights(weights, version=version)
        return roll_out(self.engine, self.task, self.config, step, self.execution.ranks)

    @property
    def _accepted(self) -> range:
        """The weight versions that the rollout's routes may be of."""
        return range(max(0, self.step - self.config.rollout.max_staleness), self.step + 1)

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate with the weights that the step begins with, where it is due."""
        every, ranks = self.config.evaluation.every, self.execution.ranks
        if not every or self.step % every:
            return {}
        # a rollout has just been sampled or ordered with these weights, and whoever samples has loaded them for it
        work = partial(evaluate, self.engine, self.task, self.config, self.step, ranks)
        if self.async_rollouts is not None:
            work = partial(self.async_rollouts.in_thread, work)
        with self._timed("evaluation"):
            return evaluation_record(ranks.gather(ranks.on_all(f"the evaluation of step {self.step}", work)))

    def _recompute(self, experience: Experience, schedule: Schedule, routes: Side) -> Recomputed:
        replay = routes == "replayed"
        return recompute(
            self.policy,
            self.execution,
            experience.generation,
            schedule.recompute,
            temperature=self.config.rollout.temperature,
            replay=replay,
            weight_version=self.step,
            accepted=self._accepted,
            gate_weights=replay and self.config.rl.routing == "R3+weights",
            indexers=self.policy.indexers is not None and self.config.rl.routing == "R2",
        )

    def _update(
        self,
        experience: Experience,
        schedule: Schedule,
        recomputed: Recomputed,
        reference_logprobs_R: NDArray[np.float32] | None,
    ) -> Updated:
        rl = self.config.rl
        # the learning rate rises linearly over the first steps, and stays
        for group in self.optimizer.param_groups:
            group["lr"] = rl.learning_rate * min(1.0, (self.step + 1) / (rl.warmup_steps + 1))
        routes = {"none": None, "R2": recomputed.executed}
        return update(
            self.policy,
            self.execution,
            self.optimizer,
            experience,
            schedule.update,
            recomputed.logprobs_R,
            routes.get(rl.routing, experience.generation.trace),
            rl,
            weight_version=self.step,
            temperature=self.config.rollout.temperature,
            accepted=None if rl.routing == "R2" else self._accepted,
            reference_logprobs_R=reference_logprobs_R,
            watch_routes=self._measures,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self.on_stage(self.step, stage)
        start = time.perf_counter()
        try:
            yield
            if self.device.type == "cuda":  # so that the clock sees what was launched
                torch.cuda.synchronize(self.device)
        finally:
            self.seconds[stage] = time.perf_counter() - start


def make_trainer(
    config: TrainConfig, task: Task, policy: hf.RoutedTransformer, execution: PolicyExecution, engine: Engine
) -> Trainer:
    """Make a trainer with a new optimizer, over the parameters that the configuration has RL change."""
    policy = trainable(config, policy)
    optimizer = make_optimizer(policy.model, lr=config.rl.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    return Trainer(config, task, policy, execution, engine, optimizer)
