"""What is known about the response tokens of a rollout before the update, and which sequences it trains on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.replay import to_device
from foreroute.train.config.rl import RejectionConfig
from foreroute.train.objective.corrections import accepted_sequences
from foreroute.train.objective.token_losses import Tokens
from foreroute.train.rollout import Experience


@dataclass(frozen=True, eq=False)
class RolloutTokens:
    """Log-probs float32 [R] of three policies, sequence after sequence, on the host.

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
        """Those of the sequences that are trained."""
        return sequences[self.trained_S[sequences]]

    def lengths(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Response tokens of each."""
        return np.asarray(self.experience.generation.response_lengths[sequences])

    def trained_tokens(self, sequences: NDArray[np.int64], logprobs_R: Tensor) -> Tokens:
        """The tokens of those that are trained.

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
