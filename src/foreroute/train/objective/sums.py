"""Figures of an update, as sums that micro-steps and ranks add up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from foreroute.train.objective.token_losses import TokenLosses
from foreroute.train.ranks import Ranks


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
    """Adds up micro-steps of one rank."""

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
        """Of all ranks; a collective call.

        Returns:
            The importance, the share of clipped tokens, and the mean divergence from the reference; 0 without tokens.
        """
        each_G7 = ranks.stacked(np.array([*self._sums, self._largest]))
        tokens, clipped, ratio, square, weight, cut, kl = each_G7[:, :-1].sum(axis=0).tolist()
        count = max(tokens, 1.0)
        effective = ratio**2 / (count * square) if square else 0.0
        importance = Importance(ratio / count, float(each_G7[:, -1].max()), effective, weight / count, cut / count)
        return importance, clipped / count, kl / count
