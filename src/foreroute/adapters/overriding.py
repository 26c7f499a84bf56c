"""Attributes of one module overridden for a while, never those of its class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import nn

from foreroute.errors import ReplayError


@contextmanager
def overridden(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `wrapper(original, ...)` stand in for an attribute of the instance; restore exactly what was there."""
    own = module.__dict__
    had_own, original = name in own, getattr(module, name)

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    own[name] = stand_in
    try:
        yield
    finally:
        if own.get(name) is not stand_in:  # somebody replaced it meanwhile; theirs stays
            pass
        elif had_own:
            own[name] = original
        else:
            del own[name]


@contextmanager
def uncopyable(module: nn.Module) -> Iterator[None]:
    """Refuse `copy.deepcopy` while hooks are in place: the copy's hooks would run the original."""

    def refuse(memo: object) -> nn.Module:
        raise ReplayError("the model cannot be copied inside a record() or replay() session; copy it before or after")

    module.__dict__["__deepcopy__"] = refuse
    try:
        yield
    finally:
        del module.__dict__["__deepcopy__"]


def is_hooked(module: nn.Module) -> bool:
    """Whether a session is open on a model with this trunk."""
    return "__deepcopy__" in module.__dict__
