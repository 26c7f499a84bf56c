"""A session that nobody opens says so: `routed.replay(trace)` without `with` would replay nothing, in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Generic, NoReturn, ParamSpec, TypeVar

from .errors import ReplayError

P = ParamSpec("P")
T = TypeVar("T")


def opened_by_with(make: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """As `contextlib.contextmanager`; what it makes warns when it goes without having been opened."""
    managed = contextmanager(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Session(managed(*args, **kwargs), make.__name__)

    return made


class _Session(AbstractContextManager[T], Generic[T]):
    def __init__(self, managed: AbstractContextManager[T], name: str) -> None:
        self._managed = managed
        self._name = name
        self._advice = f"write `with routed.{name}(...) as session:`"
        self._was_opened = False

    def __enter__(self) -> T:
        if self._was_opened:
            raise ReplayError(f"what {self._name}() returns is opened once; call it anew for each `with`")
        self._was_opened = True
        return self._managed.__enter__()

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._managed.__exit__(error_class, error, traceback)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"what {self._name}() returns has no {name}, its session may have; {self._advice}")

    def __del__(self) -> None:
        if not self._was_opened:
            warnings.warn(f"{self._name}() was never opened, and did nothing; {self._advice}", stacklevel=2)
