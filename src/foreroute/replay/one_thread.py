"""One thread at a time: who has sessions open on a model, and whose pass over it is under way.

What routers do is kept on the model. So two threads that run one model would take each other's routes; the second is
refused by the names of both, and the first goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
