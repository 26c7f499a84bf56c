"""One step of RL, from top to bottom: rollout, recompute, update.

    engine (another copy, lower precision)            trainer (float32)
    ┌──────────────────────────────┐  tokens, routes  ┌─────────────────────────┐   ┌────────────────────────┐
    │ 1 roll_out: sample, record   │ ───────────────▶ │ 2 recompute: old        │ ─▶│ 3 update: new log-probs,│
    │   routes and log-probs       │                  │   log-probs             │   │   gradients, step       │
    └──────────────▲───────────────┘                  └─────────────────────────┘   └───────────┬────────────┘
                   └──────────────────────── weights, version + 1 ──────────────────────────────┘

`rl.routing` decides whose experts 2 and 3 use:  none, the trainer's own in each forward;  R2, those of 2 again in 3;
R3, those of 1 in both. So it does whose choices the indexers of sparse attention make, where the model has some.

A reader needs two files more: `objective.py`, what 3 minimises, and `policy.py`, what a process executes. `record.py`
makes the step's line of metrics, `experts.py` executes plans on several ranks, and `run.py` is the run around steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.hf.response_logprobs import inputs, response_log_probs
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import Engine
from foreroute.errors import BatchMismatchError, DivergedError
from foreroute.mismatch import RootCounts, Sentinel, Suspicion
from foreroute.records.step_record import ADVICE, Side, StepRecord, SuspicionRecord
from foreroute.replay import RootRows
from foreroute.replay.rows import to_device
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trace.checks import as_offsets, join_ranges
from foreroute.train.chain import Task
from foreroute.train.config import RLConfig, TrainConfig
from foreroute.train.memory import pack_padded
from foreroute.train.objective import Tokens, coefficients, denominator, group_advantages, token_losses
from foreroute.train.policy import Alone, OneProcess, ScheduledPass, make_optimizer
from foreroute.train.record import Experience, Recomputed, StepPart, Updated, merged, step_record
from foreroute.trainers.sentinel import kept_tokens


@dataclass
class Trainer:
    """The state of a run between two steps."""

    config: TrainConfig
    task: Task
    policy: hf.RoutedTransformer
    execution: OneProcess
    engine: Engine
    optimizer: torch.optim.Optimizer
    step: int = 0  # the next step; the version of the policy's weights
    seconds: dict[str, float] = field(default_factory=dict)  # how long each phase of the last step took, by its name
    # called when a phase begins, with the step and the phase's name
    on_phase: Callable[[int, str], object] | None = None

    def __post_init__(self) -> None:
        self._device = next(self.policy.model.parameters()).device
        rl = self.config.rl
        self._sentinel = Sentinel(self.policy.spec) if rl.routing == "R3" and rl.sentinel != "off" else None

    def run_step(self) -> tuple[Experience, StepRecord | None]:
        """Sample one rollout and update on it; returns it and the record, on rank 0 of all ranks, elsewhere None."""
        rl, step, execution, ranks = self.config.rl, self.step, self.execution, self.execution.ranks
        device: torch.device = self._device
        replays = rl.routing == "R3"
        trains_with: Side = "replayed" if replays else "native"
        other: Side = "native" if replays else "replayed"
        measures = step % self.config.measure.compare_every == 0
        steps_taken = step * rl.mini_steps  # of the optimizer, one per mini-batch; they number the weights
        routes: RoutingTrace | None = None
        self.seconds.clear()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

        # each phase waits for the device at its end, so that seconds are of what it launched
        with self._timed("rollout"):
            experience = ranks.on_all(f"the rollout of step {step}", self.roll_out)

        with self._timed("recompute"):
            recompute, mini_batches = make_schedule(experience, rl, ranks, seed=(self.config.seed, step))
            if replays:
                # all passes replay the rollout's routes, so all are planned, in a thread, while the first runs
                routes = experience.generation.trace
                passes_of_step = [recompute, *mini_batches]
                recompute, *mini_batches = execution.plan(
                    steps_taken, routes, passes_of_step, self.optimizer, experience.generation.response_lengths
                )
            passes = {trains_with: self.recompute(experience.generation, recompute, trains_with)}
            if rl.routing == "R2":
                # the update's routes are known from here on
                routes = passes["native"].executed
                mini_batches = execution.plan(
                    steps_taken, routes, mini_batches, self.optimizer, experience.generation.response_lengths
                )

        if measures:  # the side that does not train, on the same weights and rollout
            with self._timed("measure"):
                passes[other] = self.recompute(experience.generation, recompute, other)

        suspicions: list[SuspicionRecord] | None = None
        if self._sentinel is not None and (roots := passes["replayed"].roots) is not None:
            found = ranks.on_all(f"judging the rollout of step {step}", lambda: self.judge(roots))
            suspicions = [*map(_suspicion_record, found)]
            if rl.sentinel == "drop" and found:
                generation = experience.generation
                prompts_S = generation.trace.lengths - generation.response_lengths
                kept_S = kept_tokens(found, generation.trace.lengths) - prompts_S
                experience = replace(experience, left_S=kept_S.clip(min=0))

        with self._timed("update"):
            old_logprobs_R = passes[trains_with].logprobs_R
            updated = self.update(experience, mini_batches, old_logprobs_R, routes, watch_routes=measures)

        self.step += 1  # the weights have changed: what follows reads records alone
        executed = execution.record()
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        # rank 0 writes the step's record; the others have nothing more to say about it
        parts = ranks.gather(StepPart(experience, passes, updated, peak_bytes, suspicions))
        if not parts:
            return experience, None
        whole = merged(parts) if len(parts) > 1 else parts[0]
        return whole.experience, step_record(step, whole, trains_with, self.seconds, device, executed)

    def roll_out(self) -> Experience:
        """Draw this step's problems, and sample and score the responses to this rank's block of them.

        Problems follow from the seed and the step, responses from the number of ranks too.
        """
        settings, task, step, ranks = self.config.rollout, self.task, self.step, self.execution.ranks
        self.engine.load_weights(self.policy.gather_weights(), version=step)
        # the third number names the stream: 0 the warm start's, 1 the rollout's, 2 the schedule's, 5 the order of data
        rng = np.random.default_rng([self.config.seed, step, 1])
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)) + ranks.rank)
        each = settings.prompts // ranks.size
        problems = task.problems(settings.prompts, step, rng)[each * ranks.rank : each * (ranks.rank + 1)]
        sampling = Sampling(
            task.max_response_tokens,
            task.end_token,
            settings.group_size,
            settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
        )
        generation = self.engine.generate([problem.tokens for problem in problems], sampling, generator)
        asked = [problem for problem in problems for _ in range(settings.group_size)]
        ends_S = np.cumsum(generation.response_lengths)[:-1]
        rewards_S = task.rewards(asked, np.split(generation.trace.token_ids_N[generation.sampled_N], ends_S))
        return Experience(generation, rewards_S, *group_advantages(rewards_S, settings.group_size))

    def judge(self, roots: RootCounts) -> list[Suspicion]:
        """Say what the sentinel suspects of this rank's rollout; `BatchMismatchError` where that stops the run."""
        assert self._sentinel is not None, "there is one"
        found = self._sentinel.judge(roots)
        if found and self.config.rl.sentinel == "stop":
            others = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise BatchMismatchError(f"step {self.step}: {found[0].sentence}{others}. {ADVICE['sentinel']}")
        return found

    def recompute(self, generation: Generation, planned: ScheduledPass, side: Side) -> Recomputed:
        """Run the policy over S sequences without gradients: the old log-probs, before the update.

        "replayed" is on the rollout's routes and its choices of indexers; `StaleTraceError` when these are not of this
        step's weights.
        """
        routed, replay = self.policy, side == "replayed"
        # R2 replays in the update what this pass chooses
        indexers = routed.indexers is not None and self.config.rl.routing == "R2"
        logprobs, entropies, executed, margins = [], [], [], []
        root_rows = RootRows(routed) if replay and self._sentinel is not None else None
        with torch.no_grad(), self.execution.running(planned) if replay else nullcontext():
            for number, sequences in enumerate(planned.micro_steps):
                part = generation.select(sequences)
                routes = inputs(part.trace)
                forced: AbstractContextManager[Any] = nullcontext()
                if replay:  # the version is checked: a trace of older weights is refused here
                    forced = routed.replay(self.execution.to_replay(number, routes), weight_version=self.step)
                recorded = routed.record(weight_version=self.step, margins=True, indexers=indexers)
                watched = nullcontext() if root_rows is None else routed.listening(root_rows)
                with forced, recorded as recording, watched:
                    logprobs_R, entropy_R = response_log_probs(
                        routed.model, part, self.config.rollout.temperature, entropy=True
                    )
                assert entropy_R is not None, "it was asked for"
                logprobs.append(logprobs_R.cpu().numpy())
                entropies.append(entropy_R.cpu().numpy())
                executed.append(recording.rollout(np.split(part.trace.token_ids_N, part.trace.offsets[1:-1])))
                margins.append(recording.margins_NL())
        # micro-steps take sequences by length; the caller has them in the order of the rollout
        order_S = np.concatenate(planned.micro_steps)
        responses_S, routed_S = generation.response_lengths, generation.trace.lengths - 1
        return Recomputed(
            _in_order(logprobs, order_S, responses_S),
            _in_order(entropies, order_S, responses_S),
            concatenate(executed).select(np.argsort(order_S)),
            _in_order(margins, order_S, routed_S),
            None if root_rows is None else root_rows.read(routed_S[order_S]).in_order(np.argsort(order_S)),
        )

    def update(
        self,
        experience: Experience,
        mini_batches: list[ScheduledPass],
        old_logprobs_R: NDArray[np.float32],
        routes: RoutingTrace | None,
        *,
        watch_routes: bool = False,
    ) -> Updated:
        """Take an optimizer step for each mini-batch, whose gradients are accumulated over micro-steps.

        `routes` of all S sequences are replayed in every forward and recomputation; None for the policy's own. With
        `watch_routes` routers select by themselves too, in the same forwards, for `live_agreement`. Raises
        `DivergedError` before an optimizer step whose loss or gradients are not finite.
        """
        rl, routed, execution, ranks = self.config.rl, self.policy, self.execution, self.execution.ranks
        generation, trained_S = experience.generation, experience.trained_S
        # the learning rate rises linearly over the first steps, and stays
        for group in self.optimizer.param_groups:
            group["lr"] = rl.learning_rate * min(1.0, (self.step + 1) / (rl.warmup_steps + 1))
        losses, norms, seen = [], [], [np.zeros((4, 0))]
        agreement_M2 = np.zeros((len(mini_batches), 2))
        for mini_batch in mini_batches:
            sequences = np.concatenate(mini_batch.micro_steps)
            lengths_S = trained_S[sequences]
            # one divisor for the mini-batch on all ranks, so that no cut into micro-steps changes the loss
            divisor = int(ranks.sum([denominator(lengths_S[lengths_S > 0], rl.method)])[0])
            parts: list[Tensor] = []
            with nullcontext() if routes is None else execution.running(mini_batch):
                # gradients add up over micro-steps, and are averaged over ranks
                for number, sequences in enumerate(mini_batch.micro_steps):
                    with ExitStack() as replaying:
                        if routes is not None:
                            taken = execution.to_replay(number, inputs(routes.select(sequences)))
                            forced = routed.replay(taken, weight_version=self.step, telemetry=watch_routes)
                            session = replaying.enter_context(forced)
                        logprobs_R, _ = response_log_probs(
                            routed.model, generation.select(sequences), self.config.rollout.temperature
                        )
                        tokens = _trained_tokens(experience, sequences, old_logprobs_R, logprobs_R)
                        each = token_losses(tokens, rl)
                        weights_R = coefficients(tokens.lengths_S, rl.method, each.losses_R.dtype)
                        loss = (weights_R * each.losses_R).sum()
                        (loss * ranks.size / max(divisor, 1)).backward()
                    of_tokens = [each.clipped_R, each.log_ratio_R, each.weights_R, each.cut_R]
                    # one copy, for which the device is waited for once
                    seen.append(torch.stack([*map(Tensor.double, of_tokens)]).cpu().numpy())
                    parts.append(loss.detach().double())  # stays on the device until the mini-batch ends
                    if routes is not None and watch_routes:
                        live = session.agreement()
                        agreement_M2[mini_batch.after] += live.differing_L.sum(), live.rows * len(live.differing_L)
                # one read of the device for all of them
                losses.append(float(ranks.sum([float(sum(parts))])[0]) / max(divisor, 1))
            norms.append(execution.finish_gradients(rl.max_grad_norm))
            # before the optimizer steps: weights that are lost are lost for good
            if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                raise DivergedError(
                    f"loss {losses[-1]} and gradient norm {norms[-1]} in step {self.step}; lower rl.learning_rate"
                )
            if divisor:  # of nothing its momenta alone would move the weights
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

        loss_mean, norm_mean = float(np.mean(losses or [0.0])), float(np.mean(norms or [0.0]))
        return Updated(loss_mean, norm_mean, np.concatenate(seen, axis=1), agreement_M2)

    def state(self) -> dict[str, Any]:
        """Give everything that a resumed run needs, on rank 0; randomness follows from the seed and the step.

        A collective call. Raises `DivergedError` when a weight, or what the optimizer keeps of one, is not finite.
        """
        state = {"step": self.step, **self.execution.state(self.optimizer)}
        if self._sentinel is not None:
            pasts = self.execution.ranks.gather(self._sentinel.state())
            state |= {"sentinel": torch.from_numpy(np.stack(pasts))} if pasts else {}
        moments = {f"{i}/{key}": m for i, kept in state["optimizer"]["state"].items() for key, m in kept.items()}
        for name, tensor in [*state["model"].items(), *moments.items()]:
            if not tensor.isfinite().all():
                raise DivergedError(
                    f"{name} is not finite after step {self.step - 1}; lower rl.learning_rate. Nothing was saved of it"
                )
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave on rank 0, of the same model, or raise `ValueError`. A collective call."""
        self.execution.restore(state, self.optimizer)
        ranks = self.execution.ranks
        self.step = int(ranks.max([state["step"]])[0])
        if self._sentinel is not None:
            nothing_GX = np.tile(self._sentinel.state(), (ranks.size, 1))
            given_GX = np.asarray(state.get("sentinel", nothing_GX))
            # of other ranks, or of none that watched: it begins anew
            past_GX = given_GX if given_GX.shape == nothing_GX.shape else nothing_GX
            # rank 0 alone has a state
            self._sentinel.restore(ranks.sum(past_GX if ranks.rank == 0 else 0 * past_GX)[ranks.rank])

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if self.on_phase is not None:
            self.on_phase(self.step, phase)
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":  # so that the clock sees what was launched
            torch.cuda.synchronize(self._device)
        self.seconds[phase] = time.perf_counter() - start


def make_trainer(
    config: TrainConfig, task: Task, policy: hf.RoutedTransformer, engine: Engine, execution: OneProcess | None = None
) -> Trainer:
    """Make a trainer with a new optimizer; it executes in this process unless told otherwise."""
    optimizer = make_optimizer(config, policy)
    return Trainer(config, task, policy, execution or OneProcess(policy, Alone()), engine, optimizer)


def make_schedule(
    experience: Experience, config: RLConfig, ranks: Alone, *, seed: tuple[int, int]
) -> tuple[ScheduledPass, list[ScheduledPass]]:
    """Assign the sequences of this rank to micro-steps, in an order that follows from the seed. A collective call.

    Recompute has all sequences, and the update of a mini-batch its informative ones. A rank that has too few for as
    many micro-steps as another takes some of no advantage beside them, which add nothing to the gradient.
    """
    # the last token of a sequence is not put into the model
    lengths_S = experience.generation.trace.lengths - 1

    def packed(sequences: NDArray[np.int64], fewest: int = 0) -> list[NDArray[np.int64]]:
        return pack_padded(sequences, lengths_S, config.micro_step_tokens, fewest)

    everything = np.arange(len(lengths_S))
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.informative_S))
    # a group of equal rewards teaches nothing, and may fill up a rank that has too few sequences
    spare = np.flatnonzero(~experience.informative_S)
    parts = np.array_split(order, config.mini_steps)
    # every rank takes part in the collectives of every micro-step, so all need as many as the rank with the most
    num_recompute, *num_update = ranks.max([*map(len, map(packed, [everything, *parts]))]).tolist()
    update: list[ScheduledPass] = []
    for part, count in zip(parts, num_update, strict=True):
        # a micro-step holds one sequence at least
        missing = max(0, count - len(part))
        taken, spare = np.concatenate([part, spare[:missing]]), spare[missing:]
        if count:
            update.append(ScheduledPass(f"update {len(update)}", len(update), packed(taken, count)))
    return ScheduledPass("recompute", 0, packed(everything, num_recompute)), update


def _suspicion_record(each: Suspicion) -> SuspicionRecord:
    return SuspicionRecord(
        looks_like=each.looks_like.value,
        sentence=each.sentence,
        share=each.share,
        usual=None if math.isnan(each.usual) else each.usual,
        sequence=each.sequence,
    )


def _in_order(parts: list[NDArray[Any]], order_S: NDArray[np.int64], lengths_S: NDArray[np.int64]) -> NDArray[Any]:
    """Put rows of all micro-steps, which take sequences in `order_S`, in their own order; each has `lengths_S` rows."""
    joined = np.concatenate(parts)
    ordered = np.empty_like(joined)
    # row r of the joined parts belongs to a sequence that starts at that sequence's offset in the result
    ordered[join_ranges(as_offsets(lengths_S)[order_S], lengths_S[order_S])] = joined
    return ordered


def _trained_tokens(
    experience: Experience, sequences: NDArray[np.int64], old_R: NDArray[np.float32], logprobs_R: Tensor
) -> Tokens:
    """Select the tokens that are trained on; `logprobs_R`, of the policy as it is now, are of all of `sequences`."""
    generation, lengths_S = experience.generation, experience.generation.response_lengths
    trained_S = experience.trained_S[sequences]
    # the response of each sequence in all tokens of the rollout, and in those of the micro-step
    rows_R = join_ranges(as_offsets(lengths_S)[sequences], trained_S)
    here_R = join_ranges(as_offsets(lengths_S[sequences])[:-1], trained_S)
    advantages_S = experience.advantages_S[sequences].astype(np.float32)
    device = logprobs_R.device
    return Tokens(
        logprobs_R.index_select(0, to_device(here_R, device)),
        to_device(old_R[rows_R], device),
        to_device(generation.logprobs_R[rows_R], device),
        to_device(np.repeat(advantages_S, trained_S), device),
        to_device(trained_S[trained_S > 0], device),
    )
