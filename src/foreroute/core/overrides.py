"""What stands in for methods of a module's instance while a context is open, and what is restored at its end.

Instances are changed, never classes, so that other models do not notice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ClassVar

from torch import nn

from .errors import ReplayError

COPYING = ("__deepcopy__", "__reduce_ex__")
"""What `copy.deepcopy` and `pickle` ask an instance for."""

Override = tuple[nn.Module, str, Callable[..., Any]]
"""A module, the name of an attribute, and the wrapper that stands in for it: arguments of `overridden`."""


class SelectionHook(ABC):
    """One module of a chunk that selects. A framework says how its selection is forced or watched.

    Args:
        path: dotted name inside the chunk.
        selecting: the module and the name of its method in which the selection is made.

    Attributes:
        noun: what it is, for messages.
        now: what it does in the pass on top; None outside of any.
    """

    noun: ClassVar[str]

    def __init__(self, path: str, selecting: tuple[nn.Module, str]) -> None:
        self.path = path
        self.selecting = selecting
        self.now: Any = None
        self._installed = ExitStack()

    def install(self, run: Callable[..., Any]) -> None:
        """Have `run(method, ...)` called in the place of the method, until `remove`."""
        self._installed.enter_context(overridden(*self.selecting, run))

    def remove(self) -> None:
        """Restore what was there; what somebody replaced meanwhile stays theirs."""
        self._installed.close()

    @abstractmethod
    def select(self, now: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, its selection forced and observed as `now` says."""


def install(hooks: Sequence[SelectionHook], run: Callable[..., Any]) -> None:
    """Have `run(hook, method, ...)` called in the place of the method of each hook; of none, where one cannot."""
    with ExitStack() as undoing:
        for hook in hooks:
            hook.install(partial(run, hook))
            undoing.callback(hook.remove)
        undoing.pop_all()


def remove(hooks: Iterable[SelectionHook]) -> None:
    """Take hooks off again."""
    for hook in hooks:
        hook.remove()


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
