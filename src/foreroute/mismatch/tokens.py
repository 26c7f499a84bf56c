"""Mismatch of token probabilities, kept as sums so that parts of a batch, or ranks, can be added."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError

THRESHOLDS = (1.5, 2.0)


@dataclass(frozen=True)
class TokenMismatch:
    """Sums over response tokens of r = pi_train / pi_infer, the ratio at the sampled token.

    Attributes:
        count: number of tokens.
        k3_sum: sum of r - 1 - log r.
        above: for each threshold tau of `THRESHOLDS`, how many tokens have max(r, 1 / r) > tau.
        max_abs_log: largest |log r|, in nats.
    """

    count: int
    k3_sum: float
    above: tuple[int, ...]
    max_abs_log: float

    @property
    def k3(self) -> float:
        """Mean of r - 1 - log r: an estimate of KL(pi_infer || pi_train) from tokens of pi_infer, in nats.

        Source: arXiv 2510.11370, equation 2 (Schulman's k3).
        """
        return self.k3_sum / self.count if self.count else math.nan

    def f(self, tau: float) -> float:
        """F(tau), the share of tokens with max(r, 1 / r) > tau. Source: arXiv 2510.11370, equation 3.

        Args:
            tau: one of `THRESHOLDS`; for others nothing was counted.

        Raises:
            InputError: for another one.
        """
        if tau not in THRESHOLDS:
            raise InputError(f"F({tau}) was not counted; expected tau to be one of {', '.join(map(str, THRESHOLDS))}")
        return self.above[THRESHOLDS.index(tau)] / self.count if self.count else math.nan

    def __add__(self, other: TokenMismatch) -> TokenMismatch:
        """The mismatch over the tokens of both."""
        return TokenMismatch(
            self.count + other.count,
            self.k3_sum + other.k3_sum,
            tuple(a + b for a, b in zip(self.above, other.above, strict=True)),
            max(self.max_abs_log, other.max_abs_log),
        )


def token_mismatch(train_logprobs_R: NDArray[Any], infer_logprobs_R: NDArray[Any]) -> TokenMismatch:
    """Compare log-probabilities of the same R sampled response tokens, computed in float64.

    Raises:
        InputError: when the shapes differ or a value is not finite.
    """
    train, infer = np.asarray(train_logprobs_R, np.float64), np.asarray(infer_logprobs_R, np.float64)
    if train.shape != infer.shape or train.ndim != 1:
        raise InputError(
            f"log-probs of the trainer have shape {train.shape}, of the engine {infer.shape}; expected [R]"
        )
    if not (np.isfinite(train).all() and np.isfinite(infer).all()):
        raise InputError("log-probs hold NaN or infinity; a sampled token has a finite log-probability in both engines")
    log_r = train - infer
    return TokenMismatch(
        count=len(log_r),
        k3_sum=float((np.expm1(log_r) - log_r).sum()),
        above=tuple(int((np.abs(log_r) > math.log(tau)).sum()) for tau in THRESHOLDS),
        max_abs_log=float(np.abs(log_r).max(initial=0.0)),
    )
