"""A function of a foreign module, replaced while a context is open: for what a framework has no method or setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from foreroute.errors import AttachError


@contextmanager
def swapped(module: ModuleType, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Have a module look another object up under a name, as long as the context is open.

    All threads of the process see it: the frameworks that this is for run one forward, or one set-up, at a time.

    Args:
        module: of the framework, which looks the name up among its globals when it calls.
        name: of a function or class.
        replace: the object that stands there, to the one that is to stand there.

    Raises:
        AttachError: when the module has no such name.
    """
    original = getattr(module, name, None)
    if original is None:
        raise AttachError(
            f"{module.__name__} has no {name}, in whose place routing replay works; install the release that this "
            "foreroute was tested with"
        )
    setattr(module, name, replace(original))
    try:
        yield
    finally:
        setattr(module, name, original)
