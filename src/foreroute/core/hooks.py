"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the forward of the trunk
begins and popped when it ends, so two threads that run one model would take each other's routes: the second is refused
by the names of both, and the first goes on. A recomputation pushes the pass that it repeats once more, so that a
backward may run after the session has closed, or between the forwards of other micro-batches, and still sees its own
rows.

A framework derives its hooks from `ModelHooks` and says three things: which routers there are, what the arguments of a
forward mean, and how one router is forced or watched (`SelectionHook.select`). Instances of modules are changed, never
classes, so that other models do not notice.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from .errors import ReplayError
from .handed_on import HandedOn
from .passes import ForwardArgs, Listener, OneThread, Pass, PassStack, Rows, Watch, signed_dtype
from .recompute import bind
from .selection import LayerPass, SelectionRule

ATTACHED_TWICE = (
    "this model was attached twice, and a session of the other is open; attach it once, and record and replay by what "
    "attach() returned"
)


@contextmanager
def overridden(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `wrapper(original, ...)` stand in for an attribute of the instance; restore exactly what was there.

    Somebody who wraps the attribute meanwhile keeps the stand-in below theirs for good. It then only hands on.
    """
    original, own = getattr(module, name), module.__dict__
    before = {name: own[name]} if name in own else {}
    is_over = False

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if is_over:
            return original(*args, **kwargs)
        return wrapper(original, *args, **kwargs)

    own[name] = stand_in
    try:
        yield
    finally:
        is_over = True
        if own.get(name) is stand_in:  # else somebody replaced it meanwhile; theirs stays
            del own[name]
            own.update(before)


def is_hooked(module: nn.Module) -> bool:
    """Whether a session is open on this trunk or router."""
    return module.__dict__.get("__deepcopy__") is _refuse_copy


def _refuse_copy(memo_or_protocol: object) -> nn.Module:
    raise ReplayError("the model cannot be copied inside a record() or replay() session; copy it before or after")


UNCOPYABLE = "__deepcopy__", "__reduce_ex__"
"""What `copy.deepcopy` and `pickle` ask an instance for: the hooks of a copy would run the original."""


class SelectionHook(ABC):
    """One module of a chunk that selects. A framework says how its selection is forced or watched.

    Args:
        path: dotted name inside the chunk.
        selecting: the module and the name of its method in which the selection is made.

    Attributes:
        noun: what it is, for messages.
        now: what it does in the pass on top; None outside of any.
        is_replaced: whether the method is another than when the model was attached.
    """

    noun: ClassVar[str]

    def __init__(self, path: str, selecting: tuple[nn.Module, str]) -> None:
        self.path = path
        self.selecting = selecting
        self.now: Any = None
        self.is_replaced = False
        self._attached = selecting[0].__dict__.get(selecting[1])

    def installed(self, run: Callable[..., Any]) -> AbstractContextManager[None]:
        """While the context is open, `run(method, ...)` is called in the place of the method. As `overridden`."""
        module, name = self.selecting
        self.is_replaced = module.__dict__.get(name) is not self._attached
        return overridden(module, name, run)

    @abstractmethod
    def select(self, now: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, its selection forced and observed as `now` says."""


class RouterHook(SelectionHook):
    """A router, whose `select` hands what it does to a `LayerPass`.

    Args:
        path: dotted name inside the chunk.
        selecting: the module and the name of its method in which the selection is made.
        num_experts: E.
        top_k: its number of picks.

    Attributes:
        read_back: the ids in what it hands on, [R, K] in ascending order, where they are not there as they are.
    """

    noun = "router"
    now: LayerPass | None

    def __init__(self, path: str, selecting: tuple[nn.Module, str], num_experts: int, top_k: int) -> None:
        super().__init__(path, selecting)
        self.num_experts = num_experts
        self.top_k = top_k
        self.read_back: Callable[[Any], Tensor] | None = None


class SelectingRouter(RouterHook):
    """A router whose selection is seen in its own forward, and has been seen there once (`find.probe`).

    Args:
        path: dotted name inside the model.
        module: the router.
        selecting: the module and the name of its method in which the selection is made.
        rule: how it selects.

    Attributes:
        num_experts, top_k: E and K; 0 before the probe.
        final: which top-k of its forward is its selection; 0 before the probe.
    """

    def __init__(self, path: str, module: nn.Module, selecting: tuple[nn.Module, str], rule: SelectionRule) -> None:
        super().__init__(path, selecting, num_experts=0, top_k=0)
        self.module = module
        self.rule = rule
        self.final = 0
        self.read_back = rule.read_back

    def select(self, now: LayerPass, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `SelectionHook`.

        Raises:
            ReplayError: when it selects another number of times, or for other rows.
        """
        mode = self.rule.mode(self.final, now)
        with mode:  # in a graph, `as` would bind something else
            result = forward(*args, **kwargs)
        if len(mode.seen) != self.final + 1:
            raise ReplayError(
                f"router {self.path} made {len(mode.seen)} top-k selections, but {self.final + 1} when it was "
                "attached; its forward takes another path now. Attach again"
            )
        if now.scores_into is not None:
            seen = mode.seen[-1]
            now.keep_scores(seen.scores_RE, seen.own_RK, by_probability=seen.by_probability)
        return result


class ModelHooks(ABC):
    """The hooks of one model, or of one chunk of a model in pipeline stages.

    Args:
        chunk: which chunk of its rank this is.
        trunk: the module whose forward is one pass.
        routers: in layer order. Where there are none, its passes replay nothing.
        hooked: the modules that must not be copied while hooks are in place.
        others: other modules that select, where the framework can record and replay them.

    Attributes:
        watch: what any listener wants.
        id_dtype: of ids on the device, signed.
        awaits_backward: whether a forward of the session replayed routes with gradients, so that a backward follows.
        left_behind: what is wrong with the model at the end of a session.
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
        self.every: list[SelectionHook] = [*routers, *others]
        self.id_dtype = signed_dtype(max((router.num_experts for router in routers), default=0))
        self.watch = Watch()
        self.awaits_backward = False
        self.left_behind: list[str] = []
        self.passes = PassStack(self.every)
        self.sessions = OneThread("has a record() or replay() session open on it")
        self.listeners: list[Listener] = []
        self._handed_on: HandedOn | None = None
        self._hooked = hooked
        self._picks = [(router.path, router.top_k) for router in routers]
        self._users: Counter[Any] = Counter()
        self._installed: dict[Any, AbstractContextManager[None]] = {}
        self._lock = threading.RLock()  # backwards of other threads recompute while sessions open and close

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock: of a copy, whose modules are copies too."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.RLock()

    @abstractmethod
    def session_contexts(self) -> Iterable[AbstractContextManager[Any]]:
        """What is open while a session is, routers aside: the forward of the trunk `overridden` by `run_pass`."""

    def open_others(self, current: Pass) -> Sequence[tuple[Any, Any]]:
        """What each of the other modules does in a pass, and in its recomputation; says whether they must."""
        return ()

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has; at
                the end, when a forward replaced a parameter.
        """
        with self.sessions.held("opens a session on a model"), self.hooked([self, *self.every]):
            self.listeners.append(listener)
            self._heed_listeners()
            try:
                yield
            finally:
                self.listeners.remove(listener)
                self._heed_listeners()
                handed_on = self._handed_on
                if handed_on is not None and not self.listeners:
                    self._handed_on = None
                    handed_on.remove()
        if handed_on is not None and not self.listeners:
            handed_on.checks.close()
        if self.left_behind:
            raise ReplayError(self.left_behind[0])

    def _heed_listeners(self) -> None:
        wanted = zip(Watch(), *map(attrgetter("watch"), self.listeners), strict=True)
        self.watch = Watch(*map(any, wanted))

    @contextmanager
    def hooked(self, hooks: Sequence[Any]) -> Iterator[None]:
        """Keep hooks in place until their last user leaves: sessions, and recomputations after them.

        Args:
            hooks: of modules that select; and these hooks themselves, for those of a session on the trunk.
        """
        used: list[Any] = []
        try:
            with self._lock:
                if not self._users and any(map(is_hooked, self._hooked)):
                    raise ReplayError(ATTACHED_TWICE)
                for hook in hooks:
                    if not self._users[hook]:
                        installed = hook.installed(partial(self.run_selecting, hook))
                        installed.__enter__()
                        self._installed[hook] = installed
                    self._users[hook] += 1
                    used.append(hook)
            yield
        finally:
            with self._lock:
                for hook in used:
                    self._users[hook] -= 1
                    if not self._users[hook]:
                        del self._users[hook]
                        self._installed.pop(hook).__exit__(None, None, None)

    @contextmanager
    def installed(self, _: object) -> Iterator[None]:
        """Keep the hooks of a session on the trunk, below those on routers, and refuse copies."""
        with ExitStack() as stack:
            for context in self.session_contexts():
                stack.enter_context(context)
            for module in self._hooked:
                for name in UNCOPYABLE:
                    module.__dict__[name] = _refuse_copy
                    stack.callback(module.__dict__.pop, name, None)
            yield

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
        if self.sessions.number != threading.get_ident():
            self.sessions.require_mine("runs a model")
        listeners = list(self.listeners)
        if not listeners:  # another thread closed its session when this one was about to be refused
            return forward()
        args = read()
        current = None
        if not self.routers:
            self.begin(args)
            result = forward()
        else:
            current = self.open_pass(self.begin(args), args.num_slots, args.device)
            with self.passes.on_top(current):
                bind(current, self.every, self.recomputing)
                result = forward()
            if not self._users:
                raise ReplayError(
                    "the session was closed in the middle of a forward; close it when the model has returned"
                )
            self.require_each_once(current)
        for listener in listeners:
            listener.end(self.chunk, args, current)
        return result

    def begin(self, args: ForwardArgs) -> Rows | None:
        """The routes to force on a pass that begins.

        Raises:
            ReplayError: while a CUDA graph is captured, which would keep the addresses of the tensors of this pass, and
                use them again, whatever session is open then.
        """
        if self.routers and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                f"{type(self.trunk).__name__} runs in a session while a CUDA graph is captured: the graph would go on "
                "with the routes of this pass in every later one. Capture outside of sessions, and run the model "
                'without the graph in them; or use torch.compile(mode="reduce-overhead"), which takes new routes for '
                "every pass"
            )
        self.awaits_backward |= self.watch.routes and torch.is_grad_enabled()
        rows = None
        for listener in self.listeners:  # all are asked: each notes which batch its `end` will be about
            given = listener.begin(self.chunk, args)
            rows = given if rows is None else rows
        return rows

    def open_pass(self, rows: Rows | None, num_rows: int, device: torch.device) -> Pass:
        """A pass over this many rows as routers see them, with room for what is watched."""
        current = Pass(self._picks, num_rows, self.id_dtype, device, rows, self.watch, len(self.others))
        if self.others:
            current.others = self.open_others(current)
        return current

    def require_each_once(self, current: Pass) -> None:
        """Raise `ReplayError` naming the first of those expected that did not select exactly once.

        The device is waited for only if one ran in a compiled graph.
        """
        num = current.num_expected
        if current.calls[:num] != [1] * num:
            for hook, outside, inside in zip(self.every[:num], current.calls, current.calls_L.tolist(), strict=False):
                if outside + inside != 1:
                    raise _not_once(hook, outside + inside)

    @contextmanager
    def recomputing(self, current: Pass, ran: Sequence[SelectionHook]) -> Iterator[None]:
        """While the context is open, a part of a pass runs again, and in it the routers that ran there at first."""
        with self.passes.on_top(current, again=True), self.hooked(ran):
            yield

    def run_selecting(self, hook: SelectionHook, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router, or another module that selects, which is called now, as the pass on top wants it.

        Raises:
            ReplayError: when it runs in another thread's pass, or outside of any, or before one that ran behind it when
                the model was attached, or in a checkpoint that cannot be bound.
        """
        now = hook.now
        if torch.compiler.is_compiling():  # a graph is traced in the thread that runs it, and calls no host
            if now is None:
                raise self._outside(hook)
            result = hook.select(now, forward, *args, **kwargs)
            now.calls_1.add_(1)
            return result
        if self.passes.thread.number not in (None, threading.get_ident()):
            self.passes.thread.require_mine(f"runs {hook.path} of a model")
        if now is None:
            self.sessions.require_mine(f"runs {hook.path} of a model")
            raise self._outside(hook)
        current, is_again = self.passes.top, self.passes.is_again
        # a checkpoint saves tensors in a way of its own, or switches gradients off that were on
        saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if saves or (not torch.is_grad_enabled() and (current.with_grad or is_again)):
            self.bind_checkpoints([hook])
        if is_again:
            return hook.select(now, forward, *args, **kwargs)
        if now.layer < len(self.routers):
            if now.layer < current.last_layer:
                raise ReplayError(
                    f"router {hook.path} runs behind {self.routers[current.last_layer].path}, and ran before it when "
                    "the model was attached: layers were exchanged since, and routes would follow the modules. Attach "
                    "again"
                )
            current.last_layer = now.layer
        result = hook.select(now, forward, *args, **kwargs)
        current.calls[now.layer] += 1
        is_watched = hook.is_replaced or hook.selecting[0]._forward_hooks or every_module._global_forward_hooks
        if is_watched and isinstance(hook, RouterHook):
            self._handed_on = self._handed_on or HandedOn()
            self._handed_on.follow(hook, now, result)
        return result

    def bind_checkpoints(self, running: Sequence[SelectionHook]) -> None:
        """Have the checkpoints between the pass on top and the caller repeat these in that pass. Raises as `bind`."""
        bind(self.passes.top, running, self.recomputing, until=ModelHooks.run_pass.__code__)

    def _outside(self, hook: SelectionHook) -> ReplayError:
        return ReplayError(
            f"{hook.noun} {hook.path} ran outside a forward of {type(self.trunk).__name__}. Call the model that was "
            "attached, not a part of it; open sessions before a forward, not in the middle; and where activations of a "
            "forward from before the session are recomputed, run its backward before the session is opened"
        )


def _not_once(hook: SelectionHook, count: int) -> ReplayError:
    why = (
        "PEFT ran the module that it is a copy of, as under disable_adapter() or with another adapter"
        if ".modules_to_save." in hook.path
        else "a fused kernel, a captured graph, another branch, or a checkpoint that torch.compile cannot hold in one "
        "graph bypassed it"
    )
    return ReplayError(
        f"{hook.noun} {hook.path} selected {count} times in one forward, expected once: "
        f"{'its rows would be consumed twice' if count else why}. Its choices cannot be recorded or replayed in this "
        "configuration"
    )
