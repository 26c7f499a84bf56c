"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the forward of the trunk
begins and popped when it ends, so two threads that run one model would take each other's routes: the second is refused
by the names of both, and the first goes on. A recomputation pushes the pass that it repeats once more, so that a
backward may run after the session has closed, or between the forwards of other micro-batches, and still sees its own
rows.

A framework derives its hooks from `ModelHooks` and says three things: which routers there are, what the arguments of a
forward mean, and how one router is forced or watched (`RouterHook.select`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from .errors import ReplayError
from .handed_on import HandedOn
from .overrides import Override, SelectionHook, install, is_hooked, patched, remove
from .passes import ForwardArgs, Listener, Pass, RouterHook, Rows, Watch, signed_dtype
from .recompute import bind

ATTACHED_TWICE = (
    "this model was attached twice, and a session of the other is open; attach it once, and record and replay by what "
    "attach() returned"
)


class ModelHooks(ABC):
    """The hooks of one model, or of one chunk of a model in pipeline stages.

    Args:
        chunk: which chunk of its rank this is.
        trunk: the module whose forward is one pass.
        routers: in layer order. Where there are none, its passes replay nothing.
        hooked: the modules that must not be copied while hooks are in place.
        others: other modules that select, where the framework can record and replay them.

    Attributes:
        watch: what any listener wants to keep.
        id_dtype: of ids on the device, signed.
        is_forcing: whether one gives routes.
        counts_executed: whether losses after the routers are to count the executed selection.
        counting: what else a session overrides where losses after the routers are to count the executed selection.
    """

    def __init__(
        self,
        chunk: int,
        trunk: nn.Module,
        routers: Sequence[RouterHook],
        hooked: Sequence[nn.Module],
        others: Sequence[SelectionHook] = (),
    ) -> None:
        self.chunk = chunk
        self.trunk = trunk
        self.routers = routers
        self.others = others
        self.id_dtype = signed_dtype(max((router.num_experts for router in routers), default=0))
        self.watch = Watch()
        self.is_forcing = False
        self.counts_executed = False
        self.counting: list[Override] = []
        self.passes = PassStack([*routers, *others])
        self.sessions = OneThread("has a record() or replay() session open on it")
        self.listeners: list[Listener] = []
        self.handed_on = HandedOn(routers)
        self._hooked = hooked
        self._session_hooks = ExitStack()
        self._users: Counter[SelectionHook] = Counter()
        self._lock = threading.RLock()  # backwards of other threads recompute while sessions open and close

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock: of a copy, whose modules are copies too."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.RLock()

    @abstractmethod
    def session_overrides(self) -> Iterable[Override]:
        """What a session overrides, routers aside: the forward of the trunk, to run it by `run_pass`, and the like."""

    @abstractmethod
    def after_pass(self, current: Pass) -> None:
        """Called when every router selected once in a pass."""

    def open_others(self, current: Pass) -> Sequence[tuple[Any, Any]]:
        """What each of the other modules does in a pass, and in its recomputation."""
        return ()

    def expected(self, current: Pass) -> Sequence[SelectionHook]:
        """Which hooks must select once in a pass: the routers, and others where their choices matter."""
        return self.routers

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has.
        """
        counting = self.counting if listener.counts_executed else []
        with (
            self.sessions.held("opens a session on a model"),
            self.handed_on.watched(is_first=not self.listeners),
            self.hooked([*self.routers, *self.others]),
        ):
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
    def hooked(self, hooks: Sequence[SelectionHook]) -> Iterator[None]:
        """Keep hooks in place until their last user leaves: sessions, and recomputations after them."""
        with self._lock:
            if not (self._users or self.listeners) and any(map(is_hooked, self._hooked)):
                raise ReplayError(ATTACHED_TWICE)
            install([hook for hook in hooks if hook not in self._users], self.run_selecting)
            self._users.update(hooks)
        try:
            yield
        finally:
            with self._lock:
                self._users.subtract(hooks)
                unused = [hook for hook in hooks if not self._users[hook]]
                for hook in unused:
                    del self._users[hook]
                remove(unused)

    def run_pass(self, read: Callable[[], ForwardArgs], forward: Callable[[], Any]) -> Any:
        """Run the forward of the trunk as one pass, as all listeners want it.

        Args:
            read: what its arguments say.
            forward: runs it.

        Raises:
            ReplayError: when a router did not select exactly once, or the session was closed on the way.
        """
        if self.passes.is_again:  # of a checkpoint around the whole model
            return forward()
        self.sessions.require_mine("runs a model")
        listeners = list(self.listeners)
        if not listeners:  # another thread closed its session when this one was about to be refused
            return forward()
        if self.routers:
            self._require_no_capture()
        args = read()
        rows = self.begin(args)
        if not self.routers:
            result = forward()
            for listener in listeners:
                listener.end(self.chunk, args, None)
            return result
        current = self.open_pass(rows, args.num_slots, args.device)
        with self.passes.on_top(current):
            bind(current, [*self.routers, *self.others], self.recomputing)
            result = forward()
        if not self._users:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        self.require_each_once(current)
        self.after_pass(current)
        for listener in listeners:
            listener.end(self.chunk, args, current)
        return result

    def open_pass(self, rows: Rows | None, num_rows: int, device: torch.device) -> Pass:
        """A pass over this many rows as routers see them, with room for what is watched."""
        routers = [(router.path, router.top_k) for router in self.routers]
        current = Pass(routers, num_rows, self.id_dtype, device, rows, self.watch, len(self.others))
        current.others = self.open_others(current)
        return current

    def require_each_once(self, current: Pass) -> None:
        """Raise `ReplayError` naming the first of those expected that did not select exactly once.

        The device is waited for only if one ran in a compiled graph.
        """
        hooks = self.expected(current)
        if all(count == 1 for count in current.calls[: len(hooks)]):
            return
        for hook, outside, inside in zip(hooks, current.calls, current.calls_L.tolist(), strict=False):
            count = outside + inside
            if count != 1:
                why = (
                    "its rows would be consumed twice"
                    if count
                    else "a fused kernel, a captured graph, another branch, or a checkpoint that torch.compile cannot "
                    "hold in one graph bypassed it"
                )
                raise ReplayError(
                    f"{hook.noun} {hook.path} selected {count} times in one forward, expected once: {why}. "
                    "Its choices cannot be recorded or replayed in this configuration"
                )

    def begin(self, args: ForwardArgs) -> Rows | None:
        """The routes to force on a pass that begins."""
        # All are asked, even if the first forces: each notes which batch its `end` will be about.
        given = [listener.begin(self.chunk, args) for listener in self.listeners]
        return next((rows for rows in given if rows is not None), None)

    @contextmanager
    def recomputing(self, current: Pass, ran: Sequence[SelectionHook]) -> Iterator[None]:
        """While the context is open, a part of a pass runs again, and in it the routers that ran there at first."""
        with self.passes.on_top(current, again=True), self.hooked(ran):
            yield

    def run_selecting(self, hook: SelectionHook, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router, or another module that selects, which is called now, as the pass on top wants it.

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
        current, is_again = self.passes.top, self.passes.is_again
        # a checkpoint saves tensors in a way of its own, or switches gradients off that were on
        saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if saves or (not torch.is_grad_enabled() and (current.with_grad or is_again)):
            self.bind_checkpoints([hook])
        if not is_again:
            self._require_order(hook, now.layer, current)
        result = hook.select(now, forward, *args, **kwargs)
        if not is_again:
            current.calls[now.layer] += 1
            has_hooks = hook.selecting[0]._forward_hooks or every_module._global_forward_hooks
            if (has_hooks or hook in self.handed_on.replaced) and isinstance(hook, RouterHook):
                self.handed_on.follow(hook, now, result)
        return result

    def _require_order(self, hook: SelectionHook, layer: int, current: Pass) -> None:
        """Raise `ReplayError` if a router runs before one that ran behind it when the model was attached."""
        if layer >= len(self.routers):
            return
        if layer < current.last_layer:
            raise ReplayError(
                f"router {hook.path} runs behind {self.routers[current.last_layer].path}, and ran before it when the "
                "model was attached: layers were exchanged since, and routes would follow the modules. Attach again"
            )
        current.last_layer = layer

    def bind_checkpoints(self, running: Sequence[SelectionHook]) -> None:
        """Have the checkpoints between the pass on top and the caller repeat these in that pass. Raises as `bind`."""
        bind(self.passes.top, running, self.recomputing, until=ModelHooks.run_pass.__code__)

    def _require_no_capture(self) -> None:
        """Raise `ReplayError` if a CUDA graph is being captured.

        It would keep the addresses of the tensors of this pass, and use them again, whatever session is open then.
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
        self.watch = Watch.of_any([listener.watch for listener in listeners])


class PassStack:
    """Passes, the last to begin on top. Truth value: whether there is one.

    Args:
        hooks: whose `now` is their part of the pass on top, or None: routers, then other modules that select.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self._hooks = hooks
        self._passes: list[tuple[Pass, bool]] = []
        self._thread = OneThread("is in the middle of a forward or a recomputation of it")

    def __bool__(self) -> bool:
        return bool(self._passes)

    @property
    def top(self) -> Pass:
        """The pass that decides."""
        return self._passes[-1][0]

    @property
    def is_again(self) -> bool:
        """Whether what runs now is a recomputation of a part of it."""
        return bool(self._passes) and self._passes[-1][1]

    @contextmanager
    def on_top(self, current: Pass, *, again: bool = False) -> Iterator[None]:
        """Let this pass decide until the end of the block.

        Raises:
            ReplayError: while another thread is in the middle of a pass.
        """
        # a graph is traced in the thread that runs it, and holds no locks
        with nullcontext() if torch.compiler.is_compiling() else self._thread.held("runs a model"):
            self._passes.append((current, again))
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
        parts = [None] * len(self._hooks)
        if self._passes:
            current, again = self._passes[-1]
            parts = current.parts(again=again)
        for hook, part in zip(self._hooks, parts, strict=True):
            hook.now = part


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

    def __getstate__(self) -> str:
        """What it is held for: nobody holds a copy."""
        return self._held_for

    def __setstate__(self, held_for: str) -> None:
        OneThread.__init__(self, held_for)

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
