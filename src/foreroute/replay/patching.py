"""Attributes of one module overridden for a while, never those of its class, and torch functions run in our way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from foreroute.errors import ReplayError

ATTACHED_TWICE = (
    "this model was attached twice, and a session of the other is open; attach it once, and record and replay by what "
    "attach() returned"
)

COPYING = ("__deepcopy__", "__reduce_ex__")
"""What `copy.deepcopy` and `pickle` ask an instance for."""


Override = tuple[nn.Module, str, Callable[..., Any]]
"""A module, the name of an attribute, and the wrapper that stands in for it: arguments of `overridden`."""


class CallMode(TorchFunctionMode):
    """Runs every torch function that is called while it is open by `call`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `TorchFunctionMode`."""
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function."""
        return func(*args, **kwargs)


@contextmanager
def patched(overrides: Iterable[Override], *, uncopyable_too: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Override all of these while the context is open, and refuse to copy some modules."""
    with ExitStack() as stack:
        for override in overrides:
            stack.enter_context(overridden(*override))
        for module in uncopyable_too:
            stack.enter_context(uncopyable(module))
        yield


@contextmanager
def overridden(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `wrapper(original, ...)` stand in for an attribute of the instance; restore exactly what was there.

    Somebody who wraps the attribute meanwhile keeps the stand-in below theirs for good. It then only hands on.
    """
    original = getattr(module, name)
    is_over = False

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if is_over:
            return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)

    try:
        with _in_place(module, name, stand_in):
            yield
    finally:
        is_over = True


@contextmanager
def uncopyable(module: nn.Module) -> Iterator[None]:
    """Refuse `copy.deepcopy` and pickling while hooks are in place: the copy's hooks would run the original."""
    with ExitStack() as stack:
        for name in COPYING:
            stack.enter_context(_in_place(module, name, _refuse_copy))
        yield


def is_hooked(module: nn.Module) -> bool:
    """Whether a session is open on this trunk or router."""
    return module.__dict__.get(COPYING[0]) is _refuse_copy


@contextmanager
def _in_place(module: nn.Module, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__
    before = {name: own[name]} if name in own else {}
    own[name] = stand_in
    try:
        yield
    finally:
        if own.get(name) is stand_in:  # else somebody replaced it meanwhile; theirs stays
            del own[name]
            own.update(before)


def _refuse_copy(memo_or_protocol: object) -> nn.Module:
    raise ReplayError("the model cannot be copied inside a record() or replay() session; copy it before or after")
