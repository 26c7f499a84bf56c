"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the forward of the trunk
begins and popped when it ends, so two threads that run one model would take each other's routes: the second is refused
by the names of both, and the first goes on. A recomputation pushes the input of the pass that it repeats once more, so
that a backward may run after the session has closed, or between the forwards of other micro-batches, and still sees its
own rows.

A framework derives its hooks from `ModelHooks` and says three things: which routers there are, what the arguments of a
forward mean, and how one router is forced or watched (`RouterHook.select`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from foreroute.core.overrides import Override, is_hooked, patched
from foreroute.core.recompute import bind
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
        counting: what else a session overrides where losses after the routers are to count the executed selection.
    """

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
        self._users: dict[SelectionHook[Any], int] = {}
        self._lock = threading.RLock()  # backwards of other threads recompute while sessions open and close

    @property
    def watch_again(self) -> Watch:
        """What recomputations of a pass that begins now observe. Nothing by default."""
        return Watch()

    @property
    def is_recomputing(self) -> bool:
        """Whether what runs now is in a recomputation, of a checkpoint around the whole model where it is that."""
        return bool(self.passes) and self.passes.top.is_recompute

    @abstractmethod
    def session_overrides(self) -> Iterable[Override]:
        """What a session overrides, routers aside: the forward of the trunk, to run it by `run_pass`, and the like."""

    @abstractmethod
    def after_pass(self, current: Pass) -> None:
        """Called when every router selected once in a pass."""

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has.
        """
        counting = self.counting if listener.counts_executed else []
        with self.sessions.held("opens a session on a model"), self.hooked([*self.routers, *self.indexers]):
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
    def hooked(self, hooks: Sequence[SelectionHook[Any]]) -> Iterator[None]:
        """Keep hooks in place until their last user leaves: sessions, and recomputations after them."""
        with ExitStack() as stack:
            with self._lock:
                if not (self._users or self.listeners) and any(map(is_hooked, self._hooked)):
                    raise ReplayError(ATTACHED_TWICE)
                for hook in hooks:
                    self._use(hook)
                    stack.callback(self._leave, hook)
            yield

    def _use(self, hook: SelectionHook[Any]) -> None:
        if hook not in self._users:
            hook.install(partial(self.run_selecting, hook))
        self._users[hook] = self._users.get(hook, 0) + 1

    def _leave(self, hook: SelectionHook[Any]) -> None:
        with self._lock:
            self._users[hook] -= 1
            if not self._users[hook]:
                del self._users[hook]
                hook.remove()

    def run_pass(self, read: Callable[[], ForwardArgs], forward: Callable[[], Any]) -> Any:
        """Run the forward of the trunk as one pass, as all listeners want it.

        Args:
            read: what its arguments say.
            forward: runs it.

        Raises:
            ReplayError: when a router did not select exactly once, or the session was closed on the way.
        """
        if self.is_recomputing:
            return forward()
        self.sessions.require_mine("runs a model")
        listeners = list(self.listeners)
        if not listeners:  # another thread closed its session when this one was about to be refused
            return forward()
        if self.spec is not None:
            self._require_no_capture()
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
            bind(current.input, [*self.routers, *self.indexers], self.recomputing)
            result = forward()
        if not self._users:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        self.require_each_once(current)
        self.after_pass(current)
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
    def recomputing(self, first: PassInput, ran: Sequence[SelectionHook[Any]]) -> Iterator[None]:
        """While the context is open, a part of a pass runs again, and in it the routers that ran there at first."""
        with self.passes.on_top(first.open_again()), self.hooked(ran):
            yield

    def run_selecting(self, hook: SelectionHook[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router or an indexer that is called now, as the pass on top wants it.

        Raises:
            ReplayError: when it runs in another thread's pass, or outside of any, or in a checkpoint that cannot be
                bound.
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
        self.bind_checkpoints([hook])
        result = hook.select(now, forward, *args, **kwargs)
        current.calls[now.layer] += 1
        return result

    def bind_checkpoints(self, running: Sequence[SelectionHook[Any]]) -> None:
        """Have the checkpoints between the pass on top and the caller repeat these in that pass. Raises as `bind`."""
        bind(self.passes.top.input, running, self.recomputing, until=ModelHooks.run_pass.__code__)

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
