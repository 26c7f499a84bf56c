"""Which pass decides what routers do, while several are under way: forwards of other micro-batches, recomputations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from foreroute.replay.one_thread import OneThread


class HasLayers(Protocol):
    """A forward, or the recomputation of a part of it; `layers` has an entry for each router."""

    layers: Any


P = TypeVar("P", bound=HasLayers)


class PassStack(Generic[P]):
    """Passes, the last to begin on top. Truth value: whether there is one.

    Args:
        seats: one for each router, whose `now` is the entry of the pass on top, or None.
    """

    def __init__(self, seats: Sequence[Any]) -> None:
        self._seats = seats
        self._passes: list[P] = []
        self._thread = OneThread("is in the middle of a forward or a recomputation of it")

    def __bool__(self) -> bool:
        return bool(self._passes)

    @property
    def top(self) -> P:
        """The pass that decides."""
        return self._passes[-1]

    @contextmanager
    def on_top(self, current: P) -> Iterator[None]:
        """Let this pass decide until the end of the block.

        Raises:
            ReplayError: while another thread is in the middle of a pass.
        """
        # a graph is traced in the thread that runs it, and holds no locks
        with nullcontext() if torch.compiler.is_compiling() else self._thread.held("runs a model"):
            self._passes.append(current)
            self._arm()
            try:
                yield
            finally:
                self._passes.pop()
                self._arm()

    def require_own_thread(self, path: str) -> None:
        """Raise `ReplayError` if the pass on top is another thread's, which runs this router or layer too."""
        self._thread.require_mine(f"runs {path} of a model")

    def _arm(self) -> None:
        layers = self._passes[-1].layers if self._passes else [None] * len(self._seats)
        for seat, layer in zip(self._seats, layers, strict=True):
            seat.now = layer
