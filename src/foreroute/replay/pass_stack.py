"""Which pass decides what routers do, while several are under way, and which thread may run one.

Passes are forwards of other micro-batches, and recomputations. What routers do is kept on the model. So two threads
that run one model would take each other's routes; the second is refused by the names of both, and the first goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from foreroute.errors import ReplayError

ADVICE = (
    "One model is recorded and replayed by one thread at a time: run it in the thread that opened the session, close "
    "the session first, or give each thread a copy of the model"
)


class OneThread:
    """Belongs to a thread while it is held, which that thread may do several times over.

    Args:
        held_for: what the holder does, for messages.
    """

    def __init__(self, held_for: str) -> None:
        self._held_for = held_for
        self._lock = threading.RLock()  # a session may be collected, and so closed, at any moment
        self._times = 0
        self._number: int | None = None
        self._name = ""

    @contextmanager
    def held(self, doing: str) -> Iterator[None]:
        """Hold it while the context is open, which may be closed in any thread.

        Args:
            doing: what this thread is about to do, for the message.

        Raises:
            ReplayError: when another thread holds it.
        """
        with self._lock:
            self.require_mine(doing)
            self._times += 1
            self._number, self._name = threading.get_ident(), threading.current_thread().name
        try:
            yield
        finally:
            with self._lock:
                self._times -= 1
                if not self._times:
                    self._number = None

    def require_mine(self, doing: str) -> None:
        """Raise `ReplayError` if another thread holds it."""
        number = self._number
        if number is not None and number != threading.get_ident():
            raise ReplayError(
                f"thread {threading.current_thread().name!r} {doing}, while thread {self._name!r} {self._held_for}. "
                f"{ADVICE}"
            )


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
