"""The replicas of one routed layer in one pass: weights that are borrowed for it, and gradients that are brought home.

Borrowed weights are plain tensors, which no optimizer and no checkpoint sees. Three nodes of autograd stand around what
happens to the rows of a cell, and so backward meets them in the reverse order:

    BringHome ── dispatch ── Borrow ── replicas compute ── Refetch ── combine

`Refetch` has the weights fetched again, which were given up behind the forward. `Borrow` sends gradients home.
`BringHome` waits for those of this rank's experts and adds them. Autograd takes nodes that were made later first: while
gradients travel, backward computes the home experts and sends the gradients of rows back. The order is the same on all
ranks, since they make the same nodes, those without a replica too.

What experts are made of, and what computes them, differs between frameworks: see the abstract methods of `Replicas`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.replica_weights import Cell, Fetch, GradientReturn, Home


class Replicas(ABC):
    """The replicas of one pass over one cell, on any rank of the group.

    Args:
        cell: which.
        source: of the weights.
        home: of the layer, on this rank.
        served: whether any rank has a replica. Where none has, the nodes are there with nothing to do.

    Attributes:
        cell: the same.
        home: the same.
        served: the same.
        weights: name -> [replicas here, ...] in ascending order of slot, while they are needed: in `borrow` until
            `give_up`, and in backward until gradients are sent home.
    """

    def __init__(self, cell: Cell, source: TransferEngine, home: Home, *, served: bool = True) -> None:
        self.cell = cell
        self.home = home
        self.weights: dict[str, Tensor] = {}
        self.served = served
        self._source = source
        self._fetch: Fetch | None = None
        self._pending: GradientReturn | None = None
        self._anchor: Tensor | None = None

    def announce(self) -> tuple[Tensor, ...]:
        """Before the rows are dispatched: from now on, backward will bring gradients home.

        Returns:
            What `passed_on` gives, with the gradients that come home.
        """
        self._anchor, *passed_on = BringHome.apply(self, *self.parameters())
        return tuple(passed_on)

    def fetch(self) -> None:
        """When the rows have left: on one communicator, what is launched first travels first. Waits for nothing."""
        if self.served:
            self._fetch = self._source.fetch(self.cell, self.home)

    def wait(self) -> None:
        """Wait for the weights; on a GPU, the stream does."""
        if not self.served:
            return
        fetch, self._fetch = self._fetch, None
        assert fetch is not None, "weights are fetched when rows have left"
        self.weights = fetch.wait()

    def borrow(self) -> tuple[Tensor, list[Tensor]]:
        """Wait for the weights.

        Returns:
            A token for `give_up`, and the weights as `borrowed` gives them, for what is computed now.
        """
        self.wait()
        # its node keeps this, so this does not keep it
        anchor, self._anchor = self._anchor, None
        token, *weights = Borrow.apply(self, anchor)
        return token, weights

    def give_up(self, token: Tensor, output: Tensor) -> Tensor:
        """Let other cells have the memory of the weights. Returns the output, whose backward fetches them again."""
        self.weights = {}
        refetched: Tensor = Refetch.apply(self, token, output)
        return refetched

    def refetch(self) -> None:
        """In backward, when the gradients of results have come: wait for the weights once more."""
        self.fetch()
        self.wait()

    def send_home(self, grads: Sequence[Tensor | None]) -> None:
        """Begin to return the gradients of `borrowed` weights. All ranks call it."""
        if self.served:
            self._pending = self._source.send_home(self.cell, self.gradients(grads))
        self.weights = {}

    def wait_home(self) -> dict[str, dict[int, Tensor]]:
        """The gradients of replicas elsewhere, see `GradientReturn.wait`."""
        if not self.served:
            return {}
        assert self._pending is not None, "Borrow comes first, which alone is given the scalar of BringHome"
        returned, self._pending = self._pending.wait(), None
        return returned

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """The parameters of the home experts."""

    def passed_on(self) -> list[Tensor]:
        """Views of `parameters`, if home experts compute with them, so that their gradients come to `add_home`."""
        return []

    @abstractmethod
    def borrowed(self) -> list[Tensor]:
        """The weights of the replicas here, as what computes them takes them."""

    def untrained(self, borrowed: list[Tensor]) -> list[Tensor]:
        """Those of the borrowed weights that get no gradient."""
        return []

    @abstractmethod
    def gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """What to send home, name -> [replicas here, ...], of the gradients of `borrowed`; None where no row came."""

    @abstractmethod
    def add_home(self, returned: dict[str, dict[int, Tensor]], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Add what came home to the gradients of this rank's experts.

        Args:
            returned: see `wait_home`.
            grads: of `passed_on`.

        Returns:
            The gradients of `parameters`, for autograd.
        """


class BringHome(Function):
    """`BringHome.apply(replicas, *home parameters)`: a scalar, which `Borrow` takes, and what the replicas pass on.

    It is a node that the home parameters go into, so that AccumulateGrad of a parameter comes after it.
    """

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, *home: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        passed_on = replicas.passed_on()
        ctx.mark_non_differentiable(*replicas.untrained(passed_on))
        return home[0].new_zeros(()), *passed_on

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        replicas: Replicas = ctx.replicas
        return None, *replicas.add_home(replicas.wait_home(), grads[1:])


class Borrow(Function):
    """`Borrow.apply(replicas, scalar)`: an empty token and the weights of the replicas here; on ranks with none too."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, scalar: Tensor) -> tuple[Tensor, ...]:
        ctx.replicas = replicas
        ctx.set_materialize_grads(False)
        weights = replicas.borrowed()
        ctx.mark_non_differentiable(*replicas.untrained(weights))
        return scalar.new_zeros(0), *weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.replicas.send_home(grads[1:])
        return None, grads[0]


class Refetch(Function):
    """`Refetch.apply(replicas, token of Borrow, output)`: the output. Backward begins by having the weights fetched.

    Under a non-reentrant checkpoint, whoever first asks for what was kept has the forward pass repeated, in which all
    ranks fetch. Therefore all ask here, also those that keep nothing else since they have no replica.
    """

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, token: Tensor, output: Tensor) -> Tensor:
        ctx.replicas = replicas
        ctx.save_for_backward(token)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        ctx.replicas.refetch()
        return None, torch.zeros_like(token), grads[0]
