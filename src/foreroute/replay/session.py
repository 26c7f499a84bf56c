"""What every session holds to: it is opened once, by a `with`, and is an error when nothing came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

from foreroute.errors import ReplayError

P = ParamSpec("P")
Session = TypeVar("Session")


class Opening(Generic[Session]):
    """What a `with` opens, once.

    Args:
        name: of what made it.
        context: opens and closes the session.
    """

    def __init__(self, name: str, context: AbstractContextManager[Session]) -> None:
        self._name = name
        self._context = context
        self._is_used = False

    def __enter__(self) -> Session:
        if self._is_used:
            raise ReplayError(f"a session is opened once; call {self._name}(...) again for another one")
        self._is_used = True
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if not self._is_used:
            raise ReplayError(f"the session of {self._name}(...) is not open; open it by a `with` statement")
        return self._context.__exit__(kind, error, traceback)


def opened_once(open_session: Callable[P, Iterator[Session]]) -> Callable[P, Opening[Session]]:
    """`contextlib.contextmanager`, whose contexts say so when they are entered a second time."""
    make = contextmanager(open_session)

    @wraps(open_session)
    def call(*args: P.args, **kwargs: P.kwargs) -> Opening[Session]:
        return Opening(open_session.__name__, make(*args, **kwargs))

    return call


def require_effect(num_forwards: int, *, owes_mask: bool) -> None:
    """Called when a session ends without an error.

    Args:
        num_forwards: of the attached model in the session.
        owes_mask: rows were dropped, and the mask that says which was not read.

    Raises:
        ReplayError: when it was a session in name only.
    """
    if not num_forwards:
        raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")
    if owes_mask:
        raise ReplayError(
            'rows were missing and missing="drop" was asked for, but nobody read the loss mask: multiply the '
            'loss of each token by session.loss_mask_BT, or let the model route such rows with missing="native"'
        )
