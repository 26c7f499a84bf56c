"""Low-rank adapters of experts (LoRA): an expert computes with W + s B A, where A and B are its own.

Factors live where their expert lives. What goes to a replica is W, A and B, and what comes back is the gradients of
those that are trained: as a rule A and B, which are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foreroute.ep.shards import ExpertAxis


@dataclass(frozen=True, eq=False)
class ExpertAdapter:
    """One adapter of one parameter of an experts module.

    Attributes:
        parameter: its name; [experts, in, out] where `is_transposed`, else [experts, out, in].
        name: of the adapter.
        factor_A: has a `weight` [experts x rank, in], the rows of an expert beside each other.
        factor_B: has a `weight` [out, rank x experts], the columns of an expert as far apart as there are experts.
        rank: of B A.
        is_transposed: how the parameter is laid out.
        scaling: gives s; 0 while the adapter is off.
    """

    parameter: str
    name: str
    factor_A: nn.Module
    factor_B: nn.Module
    rank: int
    is_transposed: bool
    scaling: Callable[[], float]

    @property
    def factors(self) -> list[tuple[str, nn.Module, ExpertAxis]]:
        """Name, module and axis of A and of B."""
        name_A, name_B = self._names
        return [
            (name_A, self.factor_A, ExpertAxis(0, (-1, self.rank))),
            (name_B, self.factor_B, ExpertAxis(1, (self.rank, -1))),
        ]

    @property
    def term(self) -> LowRankTerm:
        """What it adds now."""
        return LowRankTerm(self.parameter, *self._names, self.scaling(), self.is_transposed)

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self.parameter}.{self.name}.A", f"{self.parameter}.{self.name}.B"


class LowRankTerm(NamedTuple):
    """What an adapter adds to a parameter in one pass; names are those of weights."""

    parameter: str
    factor_A: str
    factor_B: str
    scaling: float
    is_transposed: bool


def adapted(name: str, weights: Mapping[str, Tensor], terms: Sequence[LowRankTerm]) -> Tensor:
    """The weight that experts compute with, [S, ...].

    Args:
        name: of the parameter.
        weights: name -> [S, ...], those of factors with their experts in front: A [S, rank, in] and B [S, out, rank].
        terms: of all parameters.
    """
    weight = weights[name]
    for term in terms:
        if term.parameter == name and term.scaling:
            left, right = (weights[factor].to(weight.dtype) for factor in (term.factor_B, term.factor_A))
            if term.is_transposed:
                left, right = right.mT, left.mT
            # as PEFT does it: what is adapted keeps its dtype
            with torch.autocast(weight.device.type, enabled=False):
                weight = torch.baddbmm(weight, left, right, alpha=term.scaling)
    return weight


def with_adapters(weights: Mapping[str, Tensor], terms: Sequence[LowRankTerm]) -> dict[str, Tensor]:
    """The same weights, those that have adapters as `adapted` gives them."""
    return {**weights, **{name: adapted(name, weights, terms) for name in {term.parameter for term in terms}}}
