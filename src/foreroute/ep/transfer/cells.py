"""Cells, the order in which they run, and the home experts of their layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Home = Mapping[str, Tensor] | Mapping[str, Sequence[Tensor]]
"""name -> [E / G, ...] or as many tensors: the home experts of a layer on this rank, in ascending order of their id."""


class Cell(NamedTuple):
    """One routed layer in one micro-step of one step: a barrier for all ranks."""

    step: int
    micro_step: int
    layer: int

    def __str__(self) -> str:
        return f"step {self.step}, micro-step {self.micro_step}, routed layer {self.layer}"


def next_cell(
    previous: Cell | None, cell: Cell, layers: Collection[int], shape: tuple[int, int], *, updating: bool
) -> Cell | None:
    """Predict the cell that runs after `cell`; None where the step ends or the pipeline's schedule decides.

    `previous` is the last one before it that was another; `layers` are those of this rank, of a step of M x L cells.
    """
    num_micro_steps, num_layers = shape
    # Forward goes up through the layers. An update turns back at the last one: backward asks for every cell again, and
    # activation checkpointing more than once, before the next micro-step begins.
    is_backward = updating and previous is not None and previous.micro_step == cell.micro_step and cell < previous
    if is_backward or (updating and cell.layer + 1 not in layers):
        if cell.layer - 1 in layers:
            return cell._replace(layer=cell.layer - 1)
    elif cell.layer + 1 in layers:
        return cell._replace(layer=cell.layer + 1)
    if len(layers) < num_layers or cell.micro_step == num_micro_steps - 1:
        return None
    return Cell(cell.step, cell.micro_step + 1, 0)


def device_of(homes: Mapping[int, Home]) -> torch.device:
    return next(experts[0].device for home in homes.values() for experts in home.values())
