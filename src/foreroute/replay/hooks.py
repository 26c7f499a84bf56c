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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from foreroute.errors import ReplayError
from foreroute.replay.passes import (
    ForwardArgs,
    Listener,
    Pass,
    PassInput,
    RouterHook,
    require_each_router_once,
)
from foreroute.replay.patching import ATTACHED_TWICE, Override, is_hooked, patched
from foreroute.replay.rows import ReplayRows
from foreroute.replay.selection import LayerPass, Watch
from foreroute.trace import RoutingSpec


class ModelHooks(ABC):
    """The hooks of one model, or of one chunk of a model in pipeline stages.

    Args:
        chunk: which chunk of its rank this is.
        trunk: the module whose forward is one pass.
        routers: in layer order.
        spec: experts and routed layers of the chunk; None where it has no routers, so that its passes replay nothing.
        hooked: the modules that must not be copied while hooks are in place.

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
    ) -> None:
        self.chunk = chunk
        self.trunk = trunk
        self.spec = spec
        self.routers = routers
        self.watch = Watch()
        self.is_forcing = False
        self.counts_executed = False
        self.counting: list[Override] = []
        self.passes = PassStack(routers)
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
        """Have `run_router` called in the place of every router. Returns what puts back what was there."""

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
        current = PassInput(self.spec, rows, args.num_slots, args.device, self.watch, self.watch_again).open()
        with self.passes.on_top(current):
            result = forward()
        if not self._users:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        require_each_router_once(self.routers, current.calls, current.calls_L)
        self.after_pass(result, current)
        for listener in listeners:
            listener.end(self.chunk, args, current.observed)
        return result

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

    def run_router(self, router: RouterHook, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router that is called now, as the pass on top wants it.

        Raises:
            ReplayError: when it runs in another thread's pass, or outside of any, or in a checkpoint of unknown kind.
        """
        # a graph is traced in the thread that runs it, and calls no host
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            self.passes.require_own_thread(router.path)
        now = router.now
        if now is None:
            self.sessions.require_mine(f"runs {router.path} of a model")
            raise ReplayError(
                f"router {router.path} ran outside a forward of {type(self.trunk).__name__}. Call the model that was "
                "attached, not a part of it; open sessions before a forward, not in the middle; and where activations "
                "of a forward from before the session are recomputed, run its backward before the session is opened"
            )
        if is_compiling:
            result = router.select(now, forward, *args, **kwargs)
            now.calls_1.add_(1)
            return result
        self.look_for_checkpoint(router.path)
        result = router.select(now, forward, *args, **kwargs)
        self.passes.top.calls[now.layer] += 1
        return result

    def look_for_checkpoint(self, path: str) -> None:
        """Called when a router, or a compiled layer with one, is. Raises as `in_checkpoint`."""
        current = self.passes.top
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
        )


class PassStack:
    """Passes, the last to begin on top. Truth value: whether there is one.

    Args:
        routers: whose `now` is their part of the pass on top, or None.
    """

    def __init__(self, routers: Sequence[RouterHook]) -> None:
        self._routers = routers
        self._passes: list[Pass] = []
        self._thread = OneThread("is in the middle of a forward or a recomputation of it")

    def __bool__(self) -> bool:
        return bool(self._passes)

    @property
    def top(self) -> Pass:
        """The pass that decides."""
        return self._passes[-1]

    @contextmanager
    def on_top(self, current: Pass) -> Iterator[None]:
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
        layers: Sequence[LayerPass | None] = self._passes[-1].layers if self._passes else [None] * len(self._routers)
        for router, layer in zip(self._routers, layers, strict=True):
            router.now = layer


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
        # Read once: another thread may let go at any moment, and no lock is taken on the way of every router.
        number = self._number
        if number is not None and number != threading.get_ident():
            raise ReplayError(
                f"thread {threading.current_thread().name!r} {doing}, while thread {self._name!r} {self._held_for}. "
                f"{ADVICE}"
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
