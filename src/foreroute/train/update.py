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
from foreroute.layout import MicroBatches
from foreroute.replay import to_device
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import as_offsets, join_ranges
from foreroute.train.config import RLConfig
from foreroute.train.objective import TokenLosses, Tokens, accepted_sequences, coefficients, denominator, token_losses
from foreroute.train.passes import PolicyExecution, Stage, inputs, sampled_logprobs
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience


@dataclass(frozen=True)
class Importance:
    """How far the probabilities of trainer and engine are apart, over the trained tokens, and what was done about it.

    Attributes:
        ratio_mean: of trainer over engine; its expectation is 1.
        ratio_max: the largest.
        effective_share: (Σ rho)^2 / (n Σ rho^2): tokens of equal weight that would be worth as much, as a share of all.
        weight_mean: what losses were multiplied by.
        cut_share: share of tokens whose weight a correction changed.
    """

    ratio_mean: float
    ratio_max: float
    effective_share: float
    weight_mean: float
    cut_share: float


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
    generation, rule = experience.generation, config.rejection
    old, engine, lengths_S = map(torch.from_numpy, (old_logprobs_R, generation.logprobs_R, generation.response_lengths))
    bounds = rule.low or 0.0, rule.high or math.inf
    accepted_S = accepted_sequences(old, engine, lengths_S, rule.kind, *bounds).numpy()
    ongoing = _Update(
        routed=routed,
        execution=execution,
        experience=experience,
        trained_S=experience.informative_S & accepted_S,
        old_R=old_logprobs_R,
        reference_R=reference_logprobs_R,
        routes=routes,
        config=config,
        weight_version=weight_version,
        versions={weight_version} if accepted is None else accepted,
        temperature=temperature,
        watch_routes=watch_routes,
    )
    taken = [ongoing.take_optimizer_step(stage, optimizer) for stage in mini_batches]
    agreement_M2 = execution.ranks.sum(np.array(ongoing.agreement, np.float64).reshape(-1, 2))
    importance, clip_share, kl = ongoing.sums.total(execution.ranks)
    return Updated(
        float(np.mean([loss for loss, _ in taken] or [0.0])),
        float(np.mean([norm for _, norm in taken] or [0.0])),
        clip_share,
        importance,
        int(execution.ranks.sum([(experience.informative_S & ~accepted_S).sum()])[0]),
        None if reference_logprobs_R is None else kl,
        _micro_step_S(mini_batches, len(experience.generation)),
        tuple(float(1 - differing / cells) for differing, cells in agreement_M2 if cells),
    )


class LossSums:
    """Adds up the figures of the micro-steps of one rank."""

    def __init__(self) -> None:
        self._sums = np.zeros(7)
        self._largest = 0.0

    def add(self, losses: TokenLosses) -> None:
        """Add the trained tokens of one micro-step."""
        if not len(losses.ratio_R):
            return
        ratio_R, weights_R = losses.ratio_R.double(), losses.weights_R.double()
        kl = ratio_R.new_zeros(()) if losses.kl_R is None else losses.kl_R.detach().double().sum()
        ratios = [ratio_R.sum(), ratio_R.square().sum()]
        parts = [losses.clipped_R.sum(), *ratios, weights_R.sum(), losses.cut_R.sum(), kl, ratio_R.max()]
        # one copy, for which the device is waited for once
        *sums, largest = torch.stack([part.double() for part in parts]).cpu().tolist()
        self._sums += np.array([len(ratio_R), *sums])
        self._largest = max(self._largest, largest)

    def total(self, ranks: Ranks) -> tuple[Importance, float, float]:
        """Sum up over all ranks; a collective call.

        Returns:
            The importance, the share of clipped tokens, and the mean divergence from the reference; 0 without tokens.
        """
        each_G7 = ranks.all_gather(np.array([*self._sums, self._largest]))
        tokens, clipped, ratio, square, weight, cut, kl = each_G7[:, :-1].sum(axis=0).tolist()
        count = max(tokens, 1.0)
        effective = ratio**2 / (count * square) if square else 0.0
        importance = Importance(ratio / count, float(each_G7[:, -1].max()), effective, weight / count, cut / count)
        return importance, clipped / count, kl / count


@dataclass(frozen=True, eq=False, kw_only=True)
class _Update:
    """What every micro-step of an update needs, by the names that `update` has for it, and what is added up.

    Attributes:
        trained_S: bool [S], sequences that are informative and were not rejected.
        sums: over all mini-batches.
        agreement: for each mini-batch, the (token, layer) whose live top-k is not the replayed set, and all of them.
    """

    routed: RoutedTransformer
    execution: PolicyExecution
    experience: Experience
    trained_S: NDArray[np.bool_]
    old_R: NDArray[np.float32]
    reference_R: NDArray[np.float32] | None
    routes: RoutingTrace | None
    config: RLConfig
    weight_version: int
    versions: Collection[int]
    temperature: float
    watch_routes: bool
    sums: LossSums = field(default_factory=LossSums)
    agreement: list[list[int]] = field(default_factory=list)

    def take_optimizer_step(self, stage: Stage, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        """Take one optimizer step, or none where nothing is trained.

        Returns:
            The loss, and the norm of its gradient before clipping.

        Raises:
            DivergedError: when one of them is not finite.
        """
        self.agreement.append([0, 0])
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
        return loss, norm

    def _accumulate(self, micro_steps: MicroBatches) -> tuple[float, int]:
        """Accumulate the gradients of the loss of a mini-batch over its micro-steps.

        Returns:
            Its sum over the tokens of all ranks, and what that is to be divided by; 0 where nothing is trained.
        """
        ranks, sequences = self.execution.ranks, micro_steps.order_S
        lengths_S = self.experience.generation.response_lengths[sequences[self.trained_S[sequences]]]
        divisor = int(ranks.sum([denominator(lengths_S, self.config.mean)])[0])
        losses: list[Tensor] = []
        # gradients add up over micro-steps and ranks, so each part is divided by the divisor of the whole mini-batch
        for number, sequences in enumerate(micro_steps):
            with self._replaying(number, sequences):
                loss = self._loss(sequences)
                (loss / max(divisor, 1)).backward()
            losses.append(loss.detach().double())
        # one read of the device for all of them
        return float(ranks.sum([float(sum(losses))])[0]), divisor

    def _loss(self, sequences: NDArray[np.int64]) -> Tensor:
        """Sum the loss over the sequences that are trained; the others take part in the forward alone."""
        part = self.experience.generation.select(sequences)
        tokens = self._trained_tokens(sequences, sampled_logprobs(self.routed.model, part, self.temperature))
        losses = token_losses(tokens, self.config)
        self.sums.add(losses)
        mean, longest = self.config.mean, self.experience.max_response_tokens
        return (coefficients(tokens.lengths_S, mean, longest, losses.losses_R.dtype) * losses.losses_R).sum()

    def _trained_tokens(self, sequences: NDArray[np.int64], logprobs_R: Tensor) -> Tokens:
        """Select the tokens of those that are trained; `logprobs_R`, of the policy as it is now, are of all of them."""
        lengths_S, trained = self.experience.generation.response_lengths, sequences[self.trained_S[sequences]]
        of_trained_R = np.repeat(self.trained_S[sequences], lengths_S[sequences])
        # the response of each sequence in all tokens of the rollout
        rows_R = join_ranges(as_offsets(lengths_S)[trained], lengths_S[trained])
        advantages_S = self.experience.advantages_S[trained].astype(np.float32)
        device = logprobs_R.device
        return Tokens(
            logprobs_R.index_select(0, to_device(np.flatnonzero(of_trained_R), device)),
            to_device(self.old_R[rows_R], device),
            to_device(self.experience.generation.logprobs_R[rows_R], device),
            None if self.reference_R is None else to_device(self.reference_R[rows_R], device),
            to_device(np.repeat(advantages_S, lengths_S[trained]), device),
            to_device(lengths_S[trained], device),
        )

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
            live = session.agreement().routing
            self.agreement[-1][0] += int(live.differing_L.sum())
            self.agreement[-1][1] += live.rows * len(live.differing_L)


def _micro_step_S(mini_batches: list[Stage], num_sequences: int) -> NDArray[np.int64]:
    micro_step_S = np.full(num_sequences, -1, np.int64)
    for number, sequences in enumerate(sequences for stage in mini_batches for sequences in stage.micro_steps):
        micro_step_S[sequences] = number
    return micro_step_S
