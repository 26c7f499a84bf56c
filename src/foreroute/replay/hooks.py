"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the forward of the trunk
begins and popped when it ends, so two threads that run one model would take each other's routes: the second is refused
by the names of both, and the first goes on. A recomputation pushes the input of the pass that it repeats once more, so
that a backward may run after the session has closed, or between the forwards of other micro-batches, and still sees its
own rows.

A framework derives its hooks from `ModelHooks` and says four things: which routers there are, what the arguments of a
forward mean, how one router is forced or watched (`RouterHook.select`), and how a recomputation finds the pass that it
belongs to.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from foreroute.errors import ReplayError
from foreroute.replay.passes import (
    ForwardArgs,
    IndexerHook,
    Listener,
    OneThread,
    Pass,
    PassInput,
    PassStack,
    RouterHook,
    SelectionHook,
    require_each_once,
)
from foreroute.replay.rows import ReplayRows
from foreroute.replay.selection import Watch
from foreroute.trace import RoutingSpec

ATTACHED_TWICE = (
    "this model was attached twice, and a session of the other is open; attach it once, and record and replay by what "
    "attach() returned"
)

COPYING = ("__deepcopy__", "__reduce_ex__")
"""What `copy.deepcopy` and `pickle` ask an instance for."""

Override = tuple[nn.Module, str, Callable[..., Any]]
"""A module, the name of an attribute, and the wrapper that stands in for it: arguments of `overridden`."""


class ModelHooks(ABC):
    """The hooks of one model, or of one chunk of a model in pipeline stages.

    Args:
        chunk: which chunk of its rank this is.
        trunk: the module whose forward is one pass.
        routers: in layer order.
        spec: experts and routed layers of the chunk; None where it has no routers, so that its passes replay nothing.
        hooked: the modules that must not be copied while hooks are in place.
        indexers: in layer order, where the framework can record and replay them.

    Attributes:
        watch: what any listener wants to observe.
        is_forcing: whether one gives routes.
        counts_executed: whether losses after the routers are to count the executed selection.
        reentrant: forwards of the checkpoints that run their function without gradients first.
        counting: what else a session overrides where losses after the routers are to count the executed selection.
    """

    reentrant: tuple[CodeType, ...] = (CheckpointFunction.forward.__code__,)

    def __init__(
        self,
        chunk: int,
        trunk: nn.Module,
        routers: Sequence[RouterHook],
        spec: RoutingSpec | None,
        hooked: Sequence[nn.Module],
        indexers: Sequence[IndexerHook] = (),
    ) -> None:
        self.chunk = chunk
        self.trunk = trunk
        self.spec = spec
        self.routers = routers
        self.indexers = indexers
        self.watch = Watch()
        self.is_forcing = False
        self.counts_executed = False
        self.counting: list[Override] = []
        self.passes = PassStack([*routers, *indexers])
        self.sessions = OneThread("has a record() or replay() session open on it")
        self.listeners: list[Listener] = []
        self._hooked = hooked
        self._session_hooks = ExitStack()
        self._unhook_routers: Callable[[], None] | None = None
        self._users = 0
        self._lock = threading.RLock()  # backwards of other threads recompute while sessions open and close

    @property
    def watch_again(self) -> Watch:
        """What recomputations of a pass that begins now observe. Nothing by default."""
        return Watch()

    @abstractmethod
    def session_overrides(self) -> Iterable[Override]:
        """What a session overrides, routers aside: the forward of the trunk, to run it by `run_pass`, and the like."""

    @abstractmethod
    def hook_routers(self) -> Callable[[], None]:
        """Have `run_selecting` called in the place of every router and indexer.

        Returns:
            What puts back what was there.
        """

    @abstractmethod
    def in_checkpoint(self, path: str, current: Pass | None, *, reentrant: bool) -> None:
        """What is called now runs in an activation checkpoint, and so will run again in backward.

        Args:
            path: of a router, of a compiled layer with one, or of the trunk.
            current: the pass that it is in; None of the trunk.
            reentrant: whether the checkpoint runs its function without gradients first.

        Raises:
            ReplayError: when its recomputation cannot be told which routes to use.
        """

    @abstractmethod
    def after_pass(self, output: Any, current: Pass) -> None:
        """A pass made this output: have the checkpoints in it open `recomputing` on its input, if they do not yet."""

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has.
        """
        counting = self.counting if listener.counts_executed else []
        with self.sessions.held("opens a session on a model"), self.routers_hooked():
            if not self.listeners:
                hooks = patched(self.session_overrides(), uncopyable_too=self._hooked)
                self._session_hooks.enter_context(hooks)
            self.listeners.append(listener)
            self._heed_listeners()
            try:
                with patched(counting):  # around those on the trunk, which may be the whole model
                    yield
            finally:
                self.listeners.remove(listener)
                self._heed_listeners()
                if not self.listeners:
                    self._session_hooks.close()

    @contextmanager
    def routers_hooked(self) -> Iterator[None]:
        """Keep the hooks on routers until the last user leaves: sessions, and recomputations after them."""
        with self._lock:
            if not self._users:
                if any(map(is_hooked, self._hooked)):
                    raise ReplayError(ATTACHED_TWICE)
                self._unhook_routers = self.hook_routers()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self._unhook_routers is not None:
                    self._unhook_routers()

    def run_pass(self, read: Callable[[], ForwardArgs], forward: Callable[[], Any]) -> Any:
        """Run the forward of the trunk as one pass, as all listeners want it.

        Args:
            read: what its arguments say.
            forward: runs it.

        Raises:
            ReplayError: when a router did not select exactly once, or the session was closed on the way.
        """
        self.sessions.require_mine("runs a model")
        listeners = list(self.listeners)
        if not listeners:  # another thread closed its session when this one was about to be refused
            return forward()
        if self.spec is not None:
            self._require_no_capture()
            if runs_without_gradients_in(*self.reentrant):
                self.in_checkpoint(type(self.trunk).__name__, None, reentrant=True)
        args = read()
        rows = self.begin(args)
        if self.spec is None:
            result = forward()
            for listener in listeners:
                listener.end(self.chunk, args, None)
            return result
        watches = self.watch, self.watch_again
        current = PassInput(self.spec, rows, args.num_slots, args.device, *watches, len(self.indexers)).open()
        with self.passes.on_top(current):
            result = forward()
        if not self._users:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        self.require_each_once(current)
        self.after_pass(result, current)
        for listener in listeners:
            listener.end(self.chunk, args, current.observed)
        return result

    def require_each_once(self, current: Pass) -> None:
        """Raise `ReplayError` unless every router selected once in the pass, and every indexer if they matter."""
        hooks: list[SelectionHook[Any]] = [*self.routers, *(self.indexers if current.input.heeds_indexers else ())]
        require_each_once(hooks, current.calls[: len(hooks)], current.calls_L[: len(hooks)])

    def begin(self, args: ForwardArgs) -> ReplayRows | None:
        """The routes to force on a pass that begins."""
        # All are asked, even if the first forces: each notes which batch its `end` will be about.
        given = [listener.begin(self.chunk, args) for listener in self.listeners]
        return next((rows for rows in given if rows is not None), None)

    @contextmanager
    def recomputing(self, first: PassInput) -> Iterator[Pass]:
        """While the context is open, a checkpointed function runs again, on the input of its own pass."""
        current = first.open_again()
        with self.passes.on_top(current), self.routers_hooked():
            yield current

    def run_selecting(self, hook: SelectionHook[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router or an indexer that is called now, as the pass on top wants it.

        Raises:
            ReplayError: when it runs in another thread's pass, or outside of any, or in a checkpoint of unknown kind.
        """
        # a graph is traced in the thread that runs it, and calls no host
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            self.passes.require_own_thread(hook.path)
        now = hook.now
        if now is None:
            self.sessions.require_mine(f"runs {hook.path} of a model")
            raise ReplayError(
                f"{hook.noun} {hook.path} ran outside a forward of {type(self.trunk).__name__}. Call the model that "
                "was attached, not a part of it; open sessions before a forward, not in the middle; and where "
                "activations of a forward from before the session are recomputed, run its backward before the session "
                "is opened"
            )
        if is_compiling:
            result = hook.select(now, forward, *args, **kwargs)
            now.calls_1.add_(1)
            return result
        current = self.passes.top
        self.look_for_checkpoint(hook.path, current)
        result = hook.select(now, forward, *args, **kwargs)
        current.calls[now.layer] += 1
        return result

    def look_for_checkpoint(self, path: str, current: Pass) -> None:
        """Called when a router, or a compiled layer with one, is in a pass. Raises as `in_checkpoint`."""
        # use_reentrant=True runs its first forward without gradients
        reentrant = current.with_grad and not torch.is_grad_enabled()
        if reentrant or saves_for_checkpoint():
            self.in_checkpoint(path, current, reentrant=reentrant)

    def _require_no_capture(self) -> None:
        """Raise `ReplayError` if a CUDA graph is being captured.

        It would keep the addresses of the rows and observations of this pass, and use them again, whatever session is
        open then.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                f"{type(self.trunk).__name__} runs in a session while a CUDA graph is captured: the graph would go on "
                "with the routes of this pass in every later one. Capture outside of sessions, and run the model "
                'without the graph in them; or use torch.compile(mode="reduce-overhead"), which takes new routes for '
                "every pass"
            )

    def _heed_listeners(self) -> None:
        listeners = self.listeners
        self.is_forcing = any(listener.forces for listener in listeners)
        self.counts_executed = any(listener.counts_executed for listener in listeners)
        self.watch = Watch(
            ids=any(listener.watch.ids for listener in listeners),
            own=any(listener.watch.own for listener in listeners),
            weights=any(listener.watch.weights for listener in listeners),
            indexers=any(listener.watch.indexers for listener in listeners),
        )


def told_apart(
    function: Callable[..., Any],
    first: Callable[[], AbstractContextManager[Any]],
    again: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., Any]:
    """A checkpointed function that runs in one context at first, and in another whenever it is recomputed."""
    ran_before = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran_before
        context, ran_before = (again if ran_before else first), True
        with context():
            return function(*args, **kwargs)

    return run


def saves_for_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` is running its function now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", "")


def runs_without_gradients_in(*forwards: CodeType) -> bool:
    """Whether one of these forwards of reentrant checkpoints is running its function now.

    That looks like any evaluation without gradients; what tells it apart is who called.
    """
    frame = None if torch.is_grad_enabled() else sys._getframe()
    # By code object, since a name proves nothing; the stack ends, and is walked only where gradients are off.
    while frame is not None:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False


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
