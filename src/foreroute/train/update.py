"""Stage 3, update: an optimizer step for each mini-batch, whose gradients are accumulated over micro-steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import ConfigError, DivergedError
from foreroute.mismatch import RoutingMismatch
from foreroute.trace import RoutingTrace
from foreroute.train.config.rl import RLConfig
from foreroute.train.device import device_of
from foreroute.train.execution import PolicyExecution
from foreroute.train.loss import Importance, LossSums, RolloutTokens, token_losses
from foreroute.train.objective import coefficients, denominator
from foreroute.train.passes import inputs, sampled_logprobs
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience
from foreroute.train.schedule import MicroSteps, Stage


@dataclass(frozen=True)
class Updated:
    """What an update did.

    Attributes:
        loss: mean over mini-batches.
        grad_norm: mean over mini-batches, before clipping.
        clip_share: share of the trained response tokens whose update the clip bounds changed.
        importance: how far trainer and engine are apart on them, and what the correction did.
        rejected_sequences: informative ones that were left out because the two disagree.
        kl: mean divergence from the reference over the trained tokens; None without one.
        micro_step_S: int64 [S], the micro-step of each sequence of this rank; -1 where it was left out.
        live_agreement: for each mini-batch, the share of (token, layer) whose live top-k is the replayed set; empty
            where nothing is replayed, or it was not watched.
    """

    loss: float
    grad_norm: float
    clip_share: float
    importance: Importance
    rejected_sequences: int
    kl: float | None
    micro_step_S: NDArray[np.int64]
    live_agreement: tuple[float, ...] = ()


def update(
    routed: RoutedTransformer,
    execution: PolicyExecution,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    mini_batches: list[Stage],
    old_logprobs_R: NDArray[np.float32],
    routes: RoutingTrace | None,
    config: RLConfig,
    *,
    weight_version: int,
    temperature: float,
    accepted: Collection[int] | None = None,
    reference_logprobs_R: NDArray[np.float32] | None = None,
    watch_routes: bool = False,
) -> Updated:
    """Take an optimizer step for each mini-batch of one rollout.

    A mini-batch of which every sequence was rejected takes none.

    Args:
        routed: the policy.
        execution: how it is executed.
        optimizer: over its parameters.
        experience: the rollout with its advantages.
        mini_batches: the sequences of each forward and backward.
        old_logprobs_R: float32 [R], from recompute.
        routes: of all S sequences, to replay in every forward and recomputation; None for the policy's own.
        config: of the loss.
        weight_version: of the policy before this update.
        temperature: of the rollout.
        accepted: the versions that `routes` may be of; that of the policy alone by default.
        reference_logprobs_R: float32 [R], of the reference policy; needed with a `kl_coefficient`.
        watch_routes: have routers select by themselves too, in the same forwards, for `live_agreement`.

    Raises:
        ConfigError: when a divergence from a reference is asked for, and there is none.
        StaleTraceError: when `routes` are of other versions.
        DivergedError: when loss or gradients are not finite; no optimizer step is taken with them.
    """
    if config.kl_coefficient and reference_logprobs_R is None:
        raise ConfigError(
            f"rl.kl_coefficient = {config.kl_coefficient} needs a reference; give the trainer one, or set it to 0"
        )
    tokens = RolloutTokens.of(experience, old_logprobs_R, reference_logprobs_R, config.rejection)
    versions = {weight_version} if accepted is None else accepted
    batch = _Batch(routed, execution, tokens, routes, config, weight_version, versions, temperature, watch_routes)
    taken = [batch.take_optimizer_step(stage, optimizer) for stage in mini_batches]
    importance, clip_share, kl = batch.sums.total(execution.ranks)
    return Updated(
        float(np.mean([loss for loss, _ in taken] or [0.0])),
        float(np.mean([norm for _, norm in taken] or [0.0])),
        clip_share,
        importance,
        int(execution.ranks.sum([tokens.rejected])[0]),
        None if reference_logprobs_R is None else kl,
        _micro_step_S(mini_batches, len(experience.generation)),
        batch.agreement.shares(execution.ranks),
    )


class RouteAgreement:
    """Adds up, over the replayed forwards of one update, how often a router's own choice is the replayed one."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, int]] = []
        self._now = (0, 0)

    def add(self, live: RoutingMismatch) -> None:
        """Add one forward: the live selection against the replayed one."""
        differing, cells = int(live.differing_L.sum()), live.rows * len(live.differing_L)
        self._now = (self._now[0] + differing, self._now[1] + cells)

    def end_mini_batch(self) -> None:
        """Note that what follows runs on other weights."""
        self._ended.append(self._now)
        self._now = (0, 0)

    def shares(self, ranks: Ranks) -> tuple[float, ...]:
        """Give the share of (token, layer) that agree, for each mini-batch in which something was replayed.

        Of all ranks; a collective call.
        """
        each_M2 = ranks.sum(np.array(self._ended, np.float64).reshape(-1, 2))
        return tuple(float(1 - differing / cells) for differing, cells in each_M2 if cells)


@dataclass(frozen=True, eq=False)
class _Batch:
    """What every micro-step of an update needs, and what the update adds up."""

    routed: RoutedTransformer
    execution: PolicyExecution
    tokens: RolloutTokens
    routes: RoutingTrace | None
    config: RLConfig
    weight_version: int
    versions: Collection[int]
    temperature: float
    watch_routes: bool
    sums: LossSums = field(default_factory=LossSums)
    agreement: RouteAgreement = field(default_factory=RouteAgreement)

    def take_optimizer_step(self, stage: Stage, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """Take one optimizer step, or none where nothing is trained.

        Returns:
            The loss, and the norm of its gradient before clipping.

        Raises:
            DivergedError: when one of them is not finite.
        """
        with nullcontext() if self.routes is None else self.execution.running(stage, updating=True):
            summed, divisor = self._accumulate(stage.micro_steps)
        loss, norm = summed / max(divisor, 1), self.execution.finish_gradients(self.config.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"loss {loss} and gradient norm {norm} in step {self.weight_version}; lower rl.learning_rate"
            )
        if divisor:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.execution.weights_changed()
        self.agreement.end_mini_batch()
        return loss, norm

    def _accumulate(self, micro_steps: MicroSteps) -> tuple[float, int]:
        """Accumulate the gradients of the loss of a mini-batch over its micro-steps.

        Returns:
            Its sum over the tokens of all ranks, and what that is to be divided by; 0 where nothing is trained.
        """
        ranks, trained = self.execution.ranks, self.tokens.trained(np.concatenate(micro_steps))
        divisor = int(ranks.sum([denominator(self.tokens.lengths(trained), self.config.mean)])[0])
        total = torch.zeros((), dtype=torch.float64, device=device_of(self.routed.model))
        # gradients add up over micro-steps and ranks, so each part is divided by the divisor of the whole mini-batch
        for number, sequences in enumerate(micro_steps):
            with self._replaying(number, sequences):
                loss = self._loss(sequences)
                (loss / max(divisor, 1)).backward()
            total += loss.detach()
        return float(ranks.sum([total.item()])[0]), divisor

    def _loss(self, sequences: NDArray[np.int64]) -> Tensor:
        """Sum the loss over the sequences that are trained; the others take part in the forward alone."""
        experience = self.tokens.experience
        part = experience.generation.select(sequences)
        logprobs_R = sampled_logprobs(self.routed.model, part, self.temperature)
        tokens = self.tokens.trained_tokens(sequences, logprobs_R)
        losses = token_losses(tokens, self.config)
        self.sums.add(losses)
        mean, longest = self.config.mean, experience.max_response_tokens
        return (coefficients(tokens.lengths_S, mean, longest, losses.losses_R.dtype) * losses.losses_R).sum()

    @contextmanager
    def _replaying(self, number: int, sequences: NDArray[np.int64]) -> Iterator[None]:
        if self.routes is None:
            yield
            return
        routes = inputs(self.routes.select(sequences))
        weights = self.config.routing == "R3+weights"
        replay = self.routed.replay(
            routes, weight_version=self.versions, gate_weights=weights, telemetry=self.watch_routes
        )
        with replay as session, self.execution.micro_step(number, routes):
            yield
        if self.watch_routes:
            self.agreement.add(session.agreement().routing)


def _micro_step_S(mini_batches: list[Stage], num_sequences: int) -> NDArray[np.int64]:
    micro_step_S = np.full(num_sequences, -1, np.int64)
    for number, sequences in enumerate(sequences for stage in mini_batches for sequences in stage.micro_steps):
        micro_step_S[sequences] = number
    return micro_step_S
