"""The replicas of one MoE layer: weights that are borrowed for a pass, and gradients that are brought home in time.

Slots are plain tensors, which neither DistributedDataParallel, nor an optimizer, nor a checkpoint sees. Three nodes of
autograd stand around what happens to the rows of a cell, and so backward meets them in the reverse order:

    BringHome ── dispatch ── Borrow ── replicas compute ── Refetch ── combine

`Refetch` has the weights fetched again where they were given up behind the forward. Backward follows a recomputation at
once, and takes the weights of that. `Borrow` sends gradients home.
`BringHome` waits for those of this rank's experts and adds them to `main_grad` in its dtype, float32 as a rule. It is a
node that the home parameters go into. So AccumulateGrad of a parameter, on which DistributedDataParallel counts the
gradient as ready, comes after it: whatever bucket is reduced then has the gradients of all replicas.

Cells without replicas have the same nodes, with nothing to do. Buckets get ready in an order that follows from the
nodes, and groups of expert data parallelism, which reduce them together, have plans of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from foreroute.adapters.megatron.plan_execution.experts import RunReplicas
from foreroute.adapters.megatron.plan_execution.fetching import Fetch, Home, lent_rows
from foreroute.ep.transfer import Cell, PendingGradients
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import GradientReturn
from foreroute.plan import CellSchedule


class BorrowedReplicas:
    """The replicas of one pass over one cell, on any rank of the group or on none.

    Args:
        peers: the expert-parallel ranks.
        cell: which.
        moves: of the cell, on this rank; None where no rank has a replica.
        home: of the layer, on this rank.
        fuses_gradients: whether kernels add the gradient of a weight to its `main_grad` and return none.
    """

    def __init__(
        self, peers: PeerGroup, cell: Cell, moves: CellSchedule | None, home: Home, *, fuses_gradients: bool
    ) -> None:
        self.cell = cell
        self.names = list(home[0])
        self.home = home
        self.slots: list[int] = [] if moves is None else np.sort(moves.served["slot"]).tolist()
        self._peers, self._moves = peers, moves
        self._fuses_gradients = fuses_gradients
        self._weights: dict[str, Tensor] | None = None
        self._fused: list[Tensor] = []
        self._pending: PendingGradients | None = None
        self._anchor: Tensor | None = None

    def take(self, fetch: Fetch | None) -> None:
        """Wait for the weights of the replicas here; None where no rank has any."""
        if fetch is None:
            self._weights = {name: self.home[0][name].detach()[None][:0] for name in self.names}
        else:
            self._weights = fetch.wait()

    def announce(self) -> None:
        """Before the rows are dispatched: from now on, backward will bring gradients home."""
        self._anchor = BringHome.apply(self, *(weights[name] for weights in self.home for name in self.names))

    def compute(
        self, run: RunReplicas, rows: Tensor, probs: Tensor, sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Run the replicas here, each on its rows.

        Args:
            run: those of this layer.
            rows: [R, D], in order of slot.
            probs: [R].
            sizes: rows of each replica here.

        Returns:
            What comes out of the replicas, and a token that hands backward on to `Borrow`.
        """
        # its node keeps this, so this does not keep it
        anchor, self._anchor = self._anchor, None
        token, *flat = Borrow.apply(self, anchor)
        num = len(self.slots)
        if self._fuses_gradients:
            self._fused = [torch.zeros_like(weight, dtype=self._gradient_dtype(weight)) for weight in flat]
            for weight, main_grad in zip(flat, self._fused, strict=True):
                weight.main_grad = main_grad
        weights = [dict(zip(self.names, flat[i::num], strict=True)) for i in range(num)]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            computed = run(weights, rows, probs, sizes)
        if self._fuses_gradients:
            for weight in flat:
                # Transformer Engine finds main_grad through the tensor, and would keep what is in the slot with it
                weight.data = weight.new_empty(0)
        return computed, token

    @property
    def has_weights(self) -> bool:
        """Whether they are here."""
        return self._weights is not None

    def release(self) -> None:
        """Other cells may have the memory from here on."""
        self._weights = None

    def send_home(self, grads: Sequence[Tensor | None]) -> None:
        """Begin to return the gradients of the replicas here, in the order of `borrow`. All ranks call it."""
        if self._moves is None:
            return
        assert self._weights is not None, "Refetch comes first"
        found = self._fused if self._fuses_gradients else grads
        # a replica that no row came to may have none
        own = [
            torch.zeros_like(weight) if grad is None else grad
            for weight, grad in zip(self.borrow(), found, strict=True)
        ]
        num = len(self.slots)
        dtype = self._gradient_dtype(next(iter(self._weights.values())))
        sent = {
            name: torch.stack(own[n * num : (n + 1) * num]) if num else self._weights[name].to(dtype)
            for n, name in enumerate(self.names)
        }
        what = f"returning the gradients of {self.cell}"
        self._pending = GradientReturn(self._peers, self._moves, sent, what)
        self._weights, self._fused = None, []

    def wait_home(self) -> list[Tensor | None]:
        """The gradients of replicas elsewhere, in float32, in the order of `BringHome`; None where there is none."""
        if self._moves is None:
            return [None] * (len(self.home) * len(self.names))
        assert self._pending is not None, "Borrow comes first, which alone is given the scalar of BringHome"
        returned, self._pending = self._pending.wait(), None
        lent = set(lent_rows(self._moves).tolist())
        return [returned[name][row] if row in lent else None for row in range(len(self.home)) for name in self.names]

    def borrow(self) -> list[Tensor]:
        """Weights of the replicas here, name after name."""
        assert self._weights is not None, "fetched before the rows were dispatched"
        # a view would keep what it is a view of, emptied or not
        return [row.data for name in self.names for row in self._weights[name]]

    def _gradient_dtype(self, weight: Tensor) -> torch.dtype:
        """What kernels make gradients in: float32 (float64 for float64) where they add, else what they compute in."""
        return torch.promote_types(weight.dtype, torch.float32) if self._fuses_gradients else weight.dtype

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd keeps: in place of a borrowed weight, or a view of it, where it lies in the slots."""
        assert self._weights is not None, "replicas compute before they are released"
        for name, weights in self._weights.items():
            if tensor.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr() and tensor.numel():
                return name, tensor.size(), tensor.stride(), tensor.storage_offset()
        return tensor

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self._weights is not None, "Refetch comes first"
        name, size, stride, offset = packed
        return self._weights[name].as_strided(size, stride, offset)


class BringHome(Function):
    """`BringHome.apply(borrowed, *home parameters)`: a scalar, which `Borrow` takes."""

    @staticmethod
    def forward(ctx: Any, borrowed: BorrowedReplicas, *home: Tensor) -> Tensor:
        ctx.borrowed, ctx.home = borrowed, home
        ctx.set_materialize_grads(False)
        return home[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = []
        for parameter, grad in zip(ctx.home, ctx.borrowed.wait_home(), strict=True):
            main_grad = getattr(parameter, "main_grad", None)
            if grad is not None and main_grad is not None:
                # autograd would round to the parameter's dtype, and after fused kernels Megatron ignores what it brings
                main_grad.add_(grad)
                grad = None
            grads.append(None if grad is None else grad.to(parameter.dtype))
        return None, *grads


class Borrow(Function):
    """`Borrow.apply(borrowed, scalar)`: a token and the weights of the replicas here. On ranks that have none too."""

    @staticmethod
    def forward(ctx: Any, borrowed: BorrowedReplicas, scalar: Tensor) -> tuple[Tensor, ...]:
        ctx.borrowed = borrowed
        ctx.set_materialize_grads(False)
        return scalar.new_zeros(()), *borrowed.borrow()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.borrowed.send_home(grads[1:])
        return None, grads[0]


class Refetch(Function):
    """`Refetch.apply(borrowed, fetch, token of Borrow, output)`: the output. Backward fetches what is not there."""

    @staticmethod
    def forward(
        ctx: Any, borrowed: BorrowedReplicas, fetch: Callable[[], Fetch | None], token: Tensor, output: Tensor
    ) -> Tensor:
        ctx.borrowed, ctx.fetch = borrowed, fetch
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.borrowed.has_weights:
            ctx.borrowed.take(ctx.fetch())
        return None, None, grads[0].new_zeros(()), grads[0]
