"""The replicas of one routed layer in one pass: their weights are fetched for it, and their gradients are returned.

Fetched weights are plain tensors, which no optimizer and no checkpoint sees. Three nodes of autograd, each named after
what its backward does, stand around what happens to the rows of a cell. Backward meets them in the reverse order:

    WaitGrads ── dispatch ── ReturnGrads ── experts compute ── FetchWeights ── combine

The forward fetches weights, too, and releases them when experts have computed: `FetchWeights` fetches them once more.
Autograd runs nodes that were made later first: while gradients of replicas travel, backward computes the home experts
and sends the gradients of rows back. The order is the same on all ranks, since all make the same nodes.

V replicas are on this rank; a framework says by the abstract methods what its experts are made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from foreroute.core.recompute import run_unnumbered
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.gradients import GradientReturn


class Replicas(ABC):
    """The replicas of one cell in one pass, made on every rank of the group; a framework says what experts are made of.

    Rows are dispatched between `register` and `fetch`; home experts compute between `fetch` and `compute`.
    """

    computes_views: ClassVar[bool] = True
    """Flag that home experts compute with the views of `register`, and not with the parameters themselves."""

    def __init__(
        self,
        cell: Cell,
        engine: TransferEngine,
        *,
        on_any_rank: bool = True,  # whether any rank has a replica; where none has, the nodes have nothing to do
    ) -> None:
        self.cell, self.on_any_rank = cell, on_any_rank
        # name -> [V, ...] in ascending order of slot; set in `compute`, and in backward until gradients are sent
        self.weights: dict[str, Tensor] = {}
        self._engine = engine
        self._returning: GradientReturn | None = None
        self._anchor: Tensor | None = None

    def register(self) -> list[Tensor]:
        """Give views of `parameters`, if any. In backward, what is returned is added before they get gradients."""
        views: list[Tensor]
        self._anchor, *views = WaitGrads.apply(self, *self.parameters())
        return views

    def fetch(self) -> None:
        if self.on_any_rank:
            # what slots lack is another thing in a recomputation: selective checkpoints must not number it
            run_unnumbered(self._engine.fetch, self.cell)

    def compute(self, home_output: Tensor, *args: Any) -> Tensor:
        """Give the rows of the home experts, and behind them those that the replicas here `run` by `args`, [N, D].

        Raises:
            TransferError: when weights cannot be had.
        """
        self.wait()
        # the node keeps this object, so this object lets go of the node
        anchor, self._anchor = self._anchor, None
        token, *inputs = ReturnGrads.apply(self, anchor)
        computed = [each.to(home_output.dtype) for each in self.run(token, inputs, *args)]
        output = torch.cat([home_output, *computed]) if computed else home_output
        # from here on, the slots may serve other cells
        self.weights = {}
        fetched: Tensor = FetchWeights.apply(self, token, output)
        return fetched

    def wait(self) -> None:
        if self.on_any_rank:
            self.weights = run_unnumbered(self._engine.wait_weights, self.cell)

    def return_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Begin to return the gradients of `graph_inputs`, and release the weights."""
        if self.on_any_rank:
            self._returning = self._engine.return_grads(self.cell, self.grads_to_return(grads))
        self.weights = {}

    def wait_grads(self) -> dict[str, dict[int, Tensor]]:
        """Wait for the gradients of replicas elsewhere, as `GradientReturn.wait` gives them."""
        if not self.on_any_rank:
            return {}
        assert self._returning is not None, "ReturnGrads, which has the anchor of WaitGrads, runs before it"
        returned, self._returning = self._returning.wait(), None
        return returned

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Give those of the home experts."""

    def graph_inputs(self) -> list[Tensor]:
        """Give what autograd knows trained weights of the replicas here by, if it is to make their gradients."""
        return []

    @abstractmethod
    def run(self, token: Tensor, inputs: Sequence[Tensor], *args: Any) -> list[Tensor]:
        """Compute the rows of the replicas here; [] without a replica. `ReturnGrads` gave the token and the inputs.

        Whatever makes gradients of weights has one of them in its graph, so that `ReturnGrads` runs behind it.
        """

    @abstractmethod
    def grads_to_return(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Give what to return, name -> [V, ...], of the gradients of `graph_inputs`; None where no row came."""

    @abstractmethod
    def add_returned(
        self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Give the gradients of `parameters`: those of the views of `register`, if any, and what `wait_grads` gave."""


class WaitGrads(Function):
    """`WaitGrads.apply(replicas, *parameters)`: a scalar as anchor of `ReturnGrads`, and views to compute with."""

    # AccumulateGrad of a parameter comes after this node, since the parameters go into it
    @staticmethod
    def forward(ctx: Any, replicas: Replicas, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        anchor = parameters[0].new_zeros(())
        if not replicas.computes_views:
            return (anchor,)
        views = [each.view_as(each) for each in parameters]
        ctx.mark_non_differentiable(
            *(view for view, each in zip(views, parameters, strict=True) if not each.requires_grad)
        )
        return anchor, *views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        replicas: Replicas = ctx.replicas
        return None, *replicas.add_returned(replicas.wait_grads(), grads[1:])


class ReturnGrads(Function):
    """`ReturnGrads.apply(replicas, anchor)`: an empty token and `graph_inputs`; on ranks without a replica too."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        return anchor.new_zeros(0), *replicas.graph_inputs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.replicas.return_grads(grads[1:])
        return None, grads[0]


class FetchWeights(Function):
    """`FetchWeights.apply(replicas, token of ReturnGrads, output)`: the output, whose backward fetches the weights."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, token: Tensor, output: Tensor) -> Tensor:
        ctx.replicas = replicas
        # Under a non-reentrant checkpoint, the first node that asks for what was saved has the forward repeated, in
        # which all ranks fetch. So all ask, also those that save nothing else since they have no replica.
        ctx.save_for_backward(token)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        ctx.replicas.fetch()
        ctx.replicas.wait()
        return None, None, grads[0]
