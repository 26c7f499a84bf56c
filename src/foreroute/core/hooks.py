"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

What a router does is decided by the pass that is under way. A pass begins and ends with the forward of the trunk, so
two threads that run one model would take each other's routes: the second is refused by the names of both, and the first
goes on. A recomputation lets the pass that it repeats decide once more, so that a backward may run after the session
has closed, or between the forwards of other micro-batches, and still sees its own rows.

A framework derives its hooks from `ModelHooks` and says three things: which routers there are, what the arguments of a
forward mean, and how one router is forced or watched (`SelectionHook.select`). Instances of modules are changed, never
classes, so that other models do not notice.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from .deferred_checks import DeferredChecks
from .errors import ReplayError
from .output_check import ExpertsCheck, OutputCheck, ids_or_obeyed
from .passes import (
    ForwardArgs,
    Interceptor,
    Pass,
    PassStack,
    RecordOptions,
    Rows,
    ThreadGuard,
    move_tensor,
    signed_dtype,
)
from .recompute import bind, run_unnumbered
from .selection import LayerPass, SelectionRule

UNCOPYABLE = "__deepcopy__", "__reduce_ex__"
"""Methods that `copy.deepcopy` and `pickle` ask an instance for: the hooks of a copy would run the original."""


@contextmanager
def overridden(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `wrapper(original, ...)` stand in for an attribute of the instance; restore exactly what was there.

    Where other code wraps the attribute meanwhile, the stand-in stays below theirs, and then only calls the original.
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
    """Say whether a session is open on this trunk or router."""
    return module.__dict__.get("__deepcopy__") is _refuse_copy


def _refuse_copy(memo_or_protocol: object) -> nn.Module:
    raise ReplayError("the model cannot be copied inside a record() or replay() session; copy it before or after")


class SelectionHook(ABC):
    """One module of a chunk that selects. A framework says how its selection is forced or watched.

    `path` is its dotted name inside the chunk, `selecting` the module and its method in which the selection is made.
    """

    noun: ClassVar[str]  # what it is, for messages

    def __init__(self, path: str, selecting: tuple[nn.Module, str]) -> None:
        self.path = path
        self.selecting = selecting
        self.now: Any = None  # what it does in the pass that is under way
        self.is_replaced = False  # whether the method is another than when the model was attached
        self._attached = selecting[0].__dict__.get(selecting[1])

    @property
    def original(self) -> Callable[..., Any]:
        """The method as it was when the model was attached."""
        module, name = self.selecting
        return self._attached or partial(getattr(type(module), name), module)

    def installed(self, run: Callable[..., Any]) -> AbstractContextManager[None]:
        """While the context is open, `run(method, ...)` is called in the place of the method. As `overridden`."""
        module, name = self.selecting
        self.is_replaced = module.__dict__.get(name) is not self._attached
        return overridden(module, name, run)

    @abstractmethod
    def select(self, now: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, its selection forced and observed as `now` says."""


class RouterHook(SelectionHook):
    """A router of E experts with K picks, whose `select` hands what it does to a `LayerPass`."""

    noun = "router"
    now: LayerPass | None

    def __init__(self, path: str, selecting: tuple[nn.Module, str], num_experts: int, top_k: int) -> None:
        super().__init__(path, selecting)
        self.num_experts = num_experts
        self.top_k = top_k
        self.by_softmax = False  # whether it selects by a softmax over all experts
        self.returns_ids = True  # whether what it returns tells its ids, which that of a block may not
        self.rule = SelectionRule()  # how it selects


class SelectingRouter(RouterHook):
    """A router whose selection is seen in its own forward, and has been seen there once (`find.find_by`)."""

    def __init__(self, path: str, module: nn.Module, selecting: tuple[nn.Module, str], rule: SelectionRule) -> None:
        super().__init__(path, selecting, num_experts=0, top_k=0)  # the probe tells E and K
        self.module = module
        self.rule = rule
        self.final = 0  # which top-k of its forward is its selection

    def select(self, now: LayerPass, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Force its final top-k. Raises `ReplayError` when it makes another number of them, or for other rows."""
        mode = self.rule.mode(self.final, now)
        with mode:  # in a graph, `as` would bind something else
            result = forward(*args, **kwargs)
        if len(mode.seen) != self.final + 1:
            raise ReplayError(
                f"router {self.path} made {len(mode.seen)} top-k selections, but {self.final + 1} when it was "
                "attached; its forward takes another path now. Attach again"
            )
        if now.margin_into is not None or now.deficit_into is not None:
            now.keep_distances(mode.seen[-1])
        return result


@dataclass(eq=False)
class _Shared:
    """A context that the first of its users enters and the last one leaves."""

    make: Callable[[], AbstractContextManager[Any]]
    num_users: int = 0
    entered: AbstractContextManager[Any] = field(default_factory=nullcontext)


class ModelHooks(ABC):
    """The hooks of one model, or of one chunk of a model in pipeline stages.

    Args:
        chunk: which chunk of its rank this is.
        trunk: the module whose forward is one pass.
        routers: in layer order. Where there are none, its passes replay nothing.
        others: other modules that select, where the framework can record and replay them.

    Attributes:
        options: what any interceptor wants of passes.
        checks: what devices are asked about passes.
        id_dtype: of ids on the device, signed.
    """

    def __init__(
        self,
        chunk: int,
        trunk: nn.Module,
        routers: Sequence[RouterHook],
        others: Sequence[SelectionHook] = (),
    ) -> None:
        self.chunk = chunk
        self.trunk = trunk
        self.routers = routers
        self.others = others
        self.every: list[SelectionHook] = [*routers, *others]
        self.id_dtype = signed_dtype(max((router.num_experts for router in routers), default=0))
        self.options = RecordOptions()
        self.counts_native = False  # whether the framework itself wants native picks of rows that are replayed
        self.checks = DeferredChecks()
        # what is called in the place of methods while a session is open, beside those that select
        self.stand_ins: list[tuple[nn.Module, str, Callable[..., Any]]] = [(trunk, "forward", self.run_trunk)]
        self.awaits_backward = False  # whether the session replayed routes with gradients, so that a backward follows
        self.left_behind: list[str] = []  # what is wrong with the model at the end of a session
        self.passes = PassStack(self.every)
        self.sessions = ThreadGuard("has a record() or replay() session open on it")
        self.interceptors: list[Interceptor] = []
        self._output_check = OutputCheck()
        # what is handed the ids that a router picked: its path, and which argument
        self.experts: dict[RouterHook, tuple[str, nn.Module, int | str]] = {}
        self._experts_check = ExpertsCheck(self.experts)
        self._modules = list({trunk: None} | {hook.selecting[0]: None for hook in self.every})
        self._num_users = 0  # sessions, and recomputations behind them
        self._on_trunk = _Shared(self._trunk_hooked)
        self._on_modules = {
            hook: _Shared(partial(hook.installed, partial(self.run_selecting, hook))) for hook in self.every
        }

    @abstractmethod
    def read_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs:
        """Read what a call of the trunk says about its batch. Raises for what cannot be recorded or replayed."""

    def session_contexts(self) -> Iterable[AbstractContextManager[Any]]:
        """Return what else is open while a session is, above its stand-ins and below the hooks on routers."""
        return ()

    def open_others(self, current: Pass) -> Sequence[tuple[Any, Any]]:
        """Return what each other module does in a pass, and in its recomputation; and whether they must."""
        return ()

    @contextmanager
    def listening(self, *interceptors: Interceptor) -> Iterator[None]:
        """Keep hooks in place, and these at both ends of every pass, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has; at
                the end, when a forward replaced a parameter, and as `DeferredChecks.close`.
        """
        with self.sessions.held("opens a session on a model"), self._used(self._on_trunk, *self._on_modules.values()):
            self.interceptors += interceptors
            self._join_options()
            self._experts_check.begin()
            try:
                yield
            finally:
                for each in interceptors:
                    self.interceptors.remove(each)
                self._join_options()
                if not self.interceptors:
                    self._experts_check.expect_uncalled()
                    self._output_check.remove()
        if not self.interceptors:
            self.checks.close()
        if self.left_behind:
            raise ReplayError(self.left_behind[0])

    def _join_options(self) -> None:
        wanted = zip(RecordOptions(), *map(attrgetter("options"), self.interceptors), strict=True)
        self.options = RecordOptions(*map(any, wanted))
        self.options = self.options._replace(native=self.options.native or self.counts_native)

    @contextmanager
    def _used(self, *contexts: _Shared) -> Iterator[None]:
        used: list[_Shared] = []
        with self.sessions.lock:  # backwards of other threads recompute while sessions open and close
            if not self._num_users and any(map(is_hooked, self._modules)):
                raise ReplayError(
                    "this model was attached twice, and a session of the other is open; attach it once, and record and "
                    "replay by what attach() returned"
                )
            self._num_users += 1
        try:
            with self.sessions.lock:
                for each in contexts:
                    if not each.num_users:
                        entered = each.make()
                        entered.__enter__()
                        each.entered = entered
                    each.num_users += 1
                    used.append(each)
            yield
        finally:
            with self.sessions.lock:
                self._num_users -= 1
                for each in used:
                    each.num_users -= 1
                    if not each.num_users:
                        each.entered.__exit__(None, None, None)
                        each.entered = nullcontext()

    @contextmanager
    def _trunk_hooked(self) -> Iterator[None]:
        """Keep the hooks of a session on the trunk, below those on routers, and refuse copies."""
        with ExitStack() as stack:
            contexts = self.session_contexts()  # which look at modules as they are without hooks
            for module, name, run in self.stand_ins:
                stack.enter_context(overridden(module, name, run))
            for context in contexts:
                stack.enter_context(context)
            for module in self._modules:
                for name in UNCOPYABLE:
                    module.__dict__[name] = _refuse_copy
                    stack.callback(module.__dict__.pop, name, None)
            yield

    def run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward of the trunk as one pass, as all interceptors want it.

        Raises `ReplayError` when a router did not select exactly once, or the session was closed on the way.
        """
        if self.passes.is_recompute:  # of a checkpoint around the whole model
            return forward(*args, **kwargs)
        if self.sessions.thread != threading.get_ident():
            self.sessions.require_mine("runs a model")
        interceptors = list(self.interceptors)
        if not interceptors:  # another thread closed its session when this one was about to be refused
            return forward(*args, **kwargs)
        # a selective checkpoint around the whole model repeats the forward alone: it must not number what is beside it
        batch, current = run_unnumbered(self._begin_trunk, args, kwargs)
        if current is None:
            result = forward(*args, **kwargs)
        else:
            with self.passes.running(current):
                bind(current, self.every, self.recomputing)
                try:
                    result = forward(*args, **kwargs)
                except BaseException:
                    self._experts_check.expect_uncalled()
                    raise
            if not self._on_trunk.num_users:
                raise ReplayError(
                    "the session was closed in the middle of a forward; close it when the model has returned"
                )
        run_unnumbered(self._end_trunk, interceptors, batch, current)
        return result

    def _begin_trunk(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ForwardArgs, Pass | None]:
        batch = self.read_args(args, kwargs)
        rows = self.begin_pass(batch)
        if not self.routers:
            return batch, None
        current = self.open_pass(rows, batch.num_router_rows, batch.device)
        current.parts()  # makes views, and keeps them
        return batch, current

    def _end_trunk(self, interceptors: Sequence[Interceptor], batch: ForwardArgs, current: Pass | None) -> None:
        if current is not None:
            self.require_each_once(current)
        for each in interceptors:
            each.end_pass(self.chunk, batch, current)
        if current is not None:  # which lives on for its recomputations
            current.outputs.clear()

    def begin_pass(self, batch: ForwardArgs) -> Rows | None:
        """Give the routes to force on a pass that begins. Raises `ReplayError` while a CUDA graph is captured."""
        if self.routers and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                f"{type(self.trunk).__name__} runs in a session while a CUDA graph is captured: the graph would go on "
                "with the routes of this pass in every later one. Capture outside of sessions, and run the model "
                'without the graph in them; or use torch.compile(mode="reduce-overhead"), which takes new routes for '
                "every pass"
            )
        self.awaits_backward |= self.options.routes and torch.is_grad_enabled()
        rows = None
        for each in self.interceptors:  # all are asked: each learns which batch its `end_pass` will be about
            given = each.begin_pass(self.chunk, batch)
            rows = given if rows is None else rows
        return rows

    def open_pass(self, rows: Rows | None, num_rows: int, device: torch.device) -> Pass:
        """Make a pass over this many rows as routers see them, with room for what is kept."""
        current = Pass(self.routers, num_rows, self.id_dtype, device, rows, self.options, len(self.others))
        if self.others:
            current.others = self.open_others(current)
        return current

    def require_each_once(self, current: Pass) -> None:
        """Raise `ReplayError` naming the first that did not select exactly once; of compiled graphs `checks` tells."""
        num = current.num_expected
        outside = current.calls[:num]
        if outside == [1] * num:
            return
        for hook, count in zip(self.every, outside, strict=False):
            if count > 1:
                raise _not_once(hook, count)
        # kept apart from `calls_L`: a CUDA graph counts its next pass at the same address
        counts_L = current.calls_L[:num] + move_tensor(torch.tensor(outside, dtype=torch.int32), current.calls_L.device)
        raise_error = partial(self._require_counts, counts_L)
        if "torch._dynamo" not in sys.modules:  # there is no graph in which they could have run
            raise_error()
        self.checks.add((counts_L != 1).any(), raise_error)

    def _require_counts(self, counts_L: Tensor) -> None:
        for hook, count in zip(self.every, counts_L.tolist(), strict=False):
            if count != 1:
                raise _not_once(hook, count)

    @contextmanager
    def routers_running(self, current: Pass) -> Iterator[None]:
        """Let routers be called one by one, outside of a forward and of sessions, as a pass wants it."""
        with self.passes.running(current), self._used(*self._on_modules.values()):
            yield

    @contextmanager
    def recomputing(self, current: Pass, ran: Sequence[SelectionHook]) -> Iterator[None]:
        """Let a part of a pass run again while the context is open, and in it the routers that ran there at first."""
        with self.passes.running(current, is_recompute=True), self._used(*map(self._on_modules.__getitem__, ran)):
            yield

    def run_selecting(self, hook: SelectionHook, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router, or another module that selects, which is called now, as the pass under way wants it.

        Raises `ReplayError` when it runs in another thread's pass, or outside of any, or before one that ran behind it
        when the model was attached, or in a checkpoint that cannot be bound.
        """
        now = hook.now
        if torch.compiler.is_compiling():  # a graph is traced in the thread that runs it, and calls no host
            if now is None:
                raise self._outside(hook)
            result = hook.select(now, forward, *args, **kwargs)
            now.calls_1.add_(1)
            return result
        if self.passes.guard.thread not in (None, threading.get_ident()):
            self.passes.guard.require_mine(f"runs {hook.path} of a model")
        if now is None:
            self.sessions.require_mine(f"runs {hook.path} of a model")
            raise self._outside(hook)
        current, is_recompute = self.passes.current, self.passes.is_recompute
        # a checkpoint saves tensors in a way of its own, or switches gradients off that were on
        saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if saves or (not torch.is_grad_enabled() and (current.with_grad or is_recompute)):
            self.bind_checkpoints([hook])
        if is_recompute:
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
        if not isinstance(hook, RouterHook):
            return result
        if hook in self._experts_check.waiting:
            self._experts_check.follow(hook, now, result, self.checks)
        if not hook.returns_ids:
            return result
        if current.options.outputs and now.ids_RK is not None:
            current.outputs[now.layer] = ids_or_obeyed(result, hook, now.ids_RK)
        is_watched = hook.is_replaced or hook.selecting[0]._forward_hooks or every_module._global_forward_hooks
        if is_watched:
            self._output_check.follow(hook, now, result, self.checks)
        return result

    def bind_checkpoints(self, running: Sequence[SelectionHook]) -> None:
        """Have checkpoints between the pass under way and the caller repeat these in that pass. Raises as `bind`."""
        bind(self.passes.current, running, self.recomputing, until=ModelHooks.run_trunk.__code__)

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
