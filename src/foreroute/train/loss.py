"""The loss of every response token of an update, which tokens are trained on, and the figures that are summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.replay import to_device
from foreroute.train.config.rl import RejectionConfig, RLConfig
from foreroute.train.objective import (
    Surrogate,
    accepted_sequences,
    cispo,
    clipped_ratio,
    correction_weights,
    engine_ratio,
    kl_to_reference,
    policy_log_ratio,
    reinforce,
)
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience


class Tokens(NamedTuple):
    """Response tokens of whole sequences, packed.

    Attributes:
        logprobs_R: [R], of the policy as it is now, differentiable.
        old_logprobs_R: [R], of the policy before the update, in the trainer.
        engine_logprobs_R: [R], of the rollout.
        reference_logprobs_R: [R], of the reference; None without one.
        advantages_R: [R].
        lengths_S: int64 [S].
    """

    logprobs_R: Tensor
    old_logprobs_R: Tensor
    engine_logprobs_R: Tensor
    reference_logprobs_R: Tensor | None
    advantages_R: Tensor
    lengths_S: Tensor


class TokenLosses(NamedTuple):
    """Losses of response tokens, and what clipping and correction did to them.

    Attributes:
        losses_R: [R], differentiable, the penalty of `kl_R` in it.
        clipped_R: bool [R], tokens whose update the clip bounds changed.
        ratio_R: [R], trainer over engine, by the level of the correction.
        weights_R: [R], what the correction made of it; 1 without one.
        cut_R: bool [R], tokens for which it is another than the ratio.
        kl_R: [R], differentiable; None without a reference.
    """

    losses_R: Tensor
    clipped_R: Tensor
    ratio_R: Tensor
    weights_R: Tensor
    cut_R: Tensor
    kl_R: Tensor | None


def token_losses(tokens: Tokens, config: RLConfig) -> TokenLosses:
    """w(rho) l(r, A) + kl_coefficient · kl, without coefficients of the mean.

    rho compares the policy before the update with the engine, since r takes over from there. In REINFORCE it compares
    the policy as it is now; without a correction its weight is r, which leaves out the engine's deviation alone.
    """
    now, old, lengths_S = tokens.logprobs_R, tokens.old_logprobs_R, tokens.lengths_S
    correction = config.correction
    behind = now if config.loss == "reinforce" else old
    ratio_R = engine_ratio(behind, tokens.engine_logprobs_R, lengths_S, correction.level)
    weights_R = correction_weights(ratio_R, correction.kind, correction.low or 0.0, correction.high or math.inf)
    losses_R, clipped_R = _surrogate(tokens, config)
    if config.loss == "reinforce" and correction.kind == "none":
        losses_R = losses_R * (now - old).detach().exp()
    elif correction.kind != "none":
        losses_R = losses_R * weights_R
    kl_R = None
    if tokens.reference_logprobs_R is not None:
        kl_R = kl_to_reference(now, tokens.reference_logprobs_R)
        losses_R = losses_R + config.kl_coefficient * kl_R
    cut_R = (weights_R != ratio_R) & (correction.kind != "none")
    return TokenLosses(losses_R, clipped_R, ratio_R, weights_R, cut_R, kl_R)


def _surrogate(tokens: Tokens, config: RLConfig) -> Surrogate:
    now, advantages_R = tokens.logprobs_R, tokens.advantages_R
    log_ratio_R = policy_log_ratio(now, tokens.old_logprobs_R, tokens.lengths_S, config.ratio)
    if config.loss == "clip":
        return clipped_ratio(log_ratio_R, advantages_R, config.clip_low, config.clip_high)
    surrogate = cispo if config.loss == "cispo" else reinforce
    return surrogate(now, log_ratio_R, advantages_R, config.clip_low, config.clip_high)


@dataclass(frozen=True, eq=False)
class RolloutTokens:
    """A rollout with the log-probs float32 [R] of three policies, sequence after sequence, on the host.

    Attributes:
        experience: the rollout.
        old_R: of the policy before the update, in the trainer.
        engine_R: of the rollout engine.
        reference_R: of the reference, or None.
        trained_S: bool [S], sequences that are informative and were not rejected.
    """

    experience: Experience
    old_R: NDArray[np.float32]
    engine_R: NDArray[np.float32]
    reference_R: NDArray[np.float32] | None
    trained_S: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        experience: Experience,
        old_logprobs_R: NDArray[np.float32],
        reference_logprobs_R: NDArray[np.float32] | None,
        rule: RejectionConfig,
    ) -> RolloutTokens:
        """Decide which sequences are trained."""
        generation = experience.generation
        old_R, engine_R = old_logprobs_R, generation.logprobs_R
        low, high = rule.low or 0.0, rule.high or math.inf
        old, engine, lengths_S = map(torch.from_numpy, (old_R, engine_R, generation.response_lengths))
        accepted_S = accepted_sequences(old, engine, lengths_S, rule.kind, low, high).numpy()
        return cls(experience, old_R, engine_R, reference_logprobs_R, experience.informative_S & accepted_S)

    @property
    def rejected(self) -> int:
        """How many sequences are informative and not trained."""
        return int((self.experience.informative_S & ~self.trained_S).sum())

    def trained(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pick those of the sequences that are trained."""
        return sequences[self.trained_S[sequences]]

    def lengths(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the response tokens of each."""
        return np.asarray(self.experience.generation.response_lengths[sequences])

    def trained_tokens(self, sequences: NDArray[np.int64], logprobs_R: Tensor) -> Tokens:
        """Select the tokens of those that are trained.

        Args:
            sequences: of a micro-step, in their order.
            logprobs_R: [R], of all their response tokens under the policy as it is now.
        """
        trained = self.trained(sequences)
        of_trained_R = np.repeat(self.trained_S[sequences], self.lengths(sequences))
        ends_S = np.cumsum(self.experience.generation.response_lengths)
        rows = [
            np.arange(end - length, end) for end, length in zip(ends_S[trained], self.lengths(trained), strict=True)
        ]
        # in front, an empty array: a micro-step may train nothing
        rows_R = np.concatenate([np.zeros(0, np.int64), *rows])
        advantages_S = self.experience.advantages_S[trained].astype(np.float32)
        device = logprobs_R.device
        return Tokens(
            logprobs_R.index_select(0, to_device(np.flatnonzero(of_trained_R), device)),
            to_device(self.old_R[rows_R], device),
            to_device(self.engine_R[rows_R], device),
            None if self.reference_R is None else to_device(self.reference_R[rows_R], device),
            to_device(np.repeat(advantages_S, self.lengths(trained)), device),
            to_device(self.lengths(trained), device),
        )


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
