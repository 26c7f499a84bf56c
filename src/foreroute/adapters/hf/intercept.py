"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

Three kinds of thing are overridden on instances, never on classes, and put back when the last session closes: the
forward of the trunk (to know where one pass over a batch begins and ends), the forward of each router (to watch or
force its selection), and the activation-checkpointing function of each layer (to know which pass a recomputation
belongs to).

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the trunk's forward begins
and popped when it ends. A checkpointed layer keeps the input of the pass it ran in, and pushes it again around its
recomputation, so that a backward may run after the session has closed, or between the forwards of other micro-batches,
and still sees its own rows.

Compiled by `torch.compile`, the same code is traced: routes and notes are tensors of the graph, the host is called at
both ends of a pass (`graph_ops`), and a recomputation inside the graph needs nothing, since the graph kept the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters.hf import graph_ops
from foreroute.adapters.hf.aux_counts import ExecutedCounts
from foreroute.adapters.hf.batch import Batch, BatchTensors, parameter_names
from foreroute.adapters.hf.checkpointing import (
    CHECKPOINTS_IN,
    compilable_under_checkpointing,
    require_prepared,
    require_unchecked,
)
from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.gate_weights import with_gate_weights
from foreroute.adapters.hf.passes import (
    Listener,
    Pass,
    PassInput,
    Seat,
    require_each_router_once,
    require_no_capture,
)
from foreroute.adapters.overriding import ATTACHED_TWICE, is_hooked, overridden, uncopyable
from foreroute.errors import ReplayError
from foreroute.replay import OneThread, PassNotes, PassStack, ReplayRows, Watch, id_dtype
from foreroute.trace import RoutingSpec


class Interceptor:
    """The hooks of one model.

    Args:
        model: the whole model, whose forward may go on to losses after the trunk's.
        trunk: the module whose forward is one pass.
        sites: the routers, in layer order.
        finals: which top-k of each router's forward is its selection.
        spec: of the model.
    """

    def __init__(
        self, model: nn.Module, trunk: nn.Module, sites: list[RouterSite], finals: list[int], spec: RoutingSpec
    ) -> None:
        self._model = model
        self._trunk = trunk
        self._sites = sites
        self._seats = [
            Seat(site.path, layer, site.plan.mode, finals[layer], site.plan.read_back is not None)
            for layer, site in enumerate(sites)
        ]
        self._spec = spec
        self._names = parameter_names(trunk.forward)
        self._listeners: list[Listener] = []
        self._sessions = OneThread("has a record() or replay() session open on it")
        self._watch = Watch()
        self._forcing = False
        self._counts_executed = False
        self._passes = PassStack[Pass](self._seats)
        self._installed: ExitStack | None = None
        self._is_whole = False
        self._users = 0
        self._lock = RLock()  # backwards of other threads recompute while sessions open and close
        self._checkpoints_open = 0
        self._number = graph_ops.register(self)
        self._ledger = torch.zeros(1, dtype=torch.int64)
        self._executed: Tensor | None = None
        self._begun_in_graph: Batch | None = None

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, or this model was attached once more and that has, or
                two listeners would force routes.
        """
        with self._sessions.held("opens a session on a model"), self._hooks(whole=True), ExitStack() as stack:
            if listener.forces and self._forcing:
                raise ReplayError("this model is already replaying a trace; close that session before opening another")
            if listener.counts_executed:
                stack.enter_context(overridden(self._model, "forward", self._run_model))
            self._listeners.append(listener)
            self._heed_listeners()
            try:
                yield
            finally:
                self._listeners.remove(listener)
                self._heed_listeners()

    def _heed_listeners(self) -> None:
        self._forcing = any(listener.forces for listener in self._listeners)
        self._counts_executed = any(listener.counts_executed for listener in self._listeners)
        self._watch = Watch()
        for listener in self._listeners:
            self._watch |= listener.watch

    @contextmanager
    def _hooks(self, *, whole: bool) -> Iterator[None]:
        """Have the hooks in place until the last user leaves; only those of routers if not `whole`."""
        with self._lock:
            if self._installed is None:
                self._installed, self._is_whole = self._install(whole=whole), whole
            elif whole and not self._is_whole:
                raise ReplayError(
                    f"a part of {type(self._trunk).__name__} is being recomputed in a backward; open the session "
                    "before or after it"
                )
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    installed, self._installed = self._installed, None
                    installed.close()

    def _install(self, *, whole: bool) -> ExitStack:
        if any(is_hooked(site.selecting[0]) for site in self._sites):
            raise ReplayError(ATTACHED_TWICE)
        with ExitStack() as stack:
            for seat, site in zip(self._seats, self._sites, strict=True):
                stack.enter_context(overridden(*site.selecting, partial(self._run_router, seat)))
            if whole:
                stack.enter_context(overridden(self._trunk, "forward", self._run_trunk))
                for module in {self._trunk, *(site.selecting[0] for site in self._sites)}:
                    stack.enter_context(uncopyable(module))
                self._hook_layers(stack)
            return stack.pop_all()

    def _hook_layers(self, stack: ExitStack) -> None:
        """Hooks on whatever checkpoints a part of the trunk, or was compiled on its own with a router in it."""
        routers = {site.selecting[0] for site in self._sites}
        checkpoints = False
        for path, module in self._trunk.named_modules():
            own = module.__dict__
            for name in CHECKPOINTS_IN:
                if callable(own.get(name)):
                    stack.enter_context(overridden(module, name, self._run_checkpoint))
                    checkpoints = True
            compiled = "forward" if "dynamo_ctx" in own else "_compiled_call_impl"
            if own.get(compiled) is not None and not routers.isdisjoint(module.modules()):
                stack.enter_context(overridden(module, compiled, partial(self._run_compiled, path)))
        if checkpoints:
            stack.enter_context(compilable_under_checkpointing())

    def _run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts = ExecutedCounts(lambda: self._executed, self._spec.num_experts)
        self._executed = None
        try:
            with counts:
                result = forward(*args, **kwargs)
            counts.require_counted(result)
        finally:
            self._executed = None
        return result

    def _run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            tensors = BatchTensors.of_call(self._names, args, kwargs)
            return self._run_trunk_in_graph(tensors, forward, args, kwargs)
        self._sessions.require_mine("runs a model")
        listeners = list(self._listeners)
        if not listeners:  # another thread closed its session when this one was about to be refused
            return forward(*args, **kwargs)
        require_unchecked(type(self._trunk).__name__)
        require_no_capture(type(self._trunk).__name__)
        batch = Batch.read(BatchTensors.of_call(self._names, args, kwargs))
        rows = self._begin(batch)
        current = PassInput(self._spec, rows, batch.num_slots, batch.device, self._watch).open()
        with self._passes.on_top(current):
            result = forward(*args, **kwargs)
        if self._installed is None:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        self._executed = current.notes.ids_LRK if self._counts_executed else None
        require_each_router_once(self._seats, current.calls, current.calls_L)
        for listener in listeners:
            listener.end(batch, current.notes)
        return result

    def _run_trunk_in_graph(
        self, tensors: BatchTensors, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ids_LRK, routed_R = graph_ops.begin_pass(
            self._number,
            self._ledger,
            tensors.input_ids_BT,
            tensors.mask,
            tensors.position_ids,
            tensors.cumulative,
            tensors.past,
        )
        rows = ReplayRows(ids_LRK, routed_R, None, routed_R, routed_R) if self._forcing else None
        slots = tensors.input_ids_BT
        current = PassInput(self._spec, rows, slots.numel(), slots.device, self._watch).open()
        with self._passes.on_top(current):
            result = forward(*args, **kwargs)
        self._executed = current.notes.ids_LRK if self._counts_executed else None
        graph_ops.end_pass(self._number, self._ledger, current.calls_L, current.notes.tensors())
        return result

    def begin_from_graph(
        self, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None, cumulative: Tensor | None, past: int
    ) -> tuple[Tensor, Tensor]:
        """See `graph_ops.Host`."""
        self._sessions.require_mine("runs a model")
        require_no_capture(type(self._trunk).__name__)
        batch = Batch.read(BatchTensors(input_ids, mask, positions, cumulative, past))
        rows = self._begin(batch)
        if self._watch.weights or (rows is not None and rows.weights_LRK is not None):
            raise ReplayError(
                "gate weights are recorded and replayed in eager mode alone; take torch.compile off the model, or "
                "leave gate_weights out"
            )
        self._begun_in_graph = batch
        if rows is not None:
            return rows.ids_LRK, rows.routed_R
        num_slots = batch.num_slots
        shape, dtype = self.shapes_for_graph(num_slots)
        nothing = torch.zeros(num_slots, dtype=torch.bool, device=batch.device)
        return torch.empty(shape, dtype=dtype, device=batch.device), nothing

    def end_from_graph(self, calls_L: Tensor, notes: list[Tensor]) -> None:
        """See `graph_ops.Host`."""
        require_each_router_once(self._seats, [0] * len(self._seats), calls_L)
        assert self._begun_in_graph is not None, "a compiled pass ends after it has begun"
        batch, self._begun_in_graph = self._begun_in_graph, None
        # a CUDA graph writes the next pass's notes to the same addresses
        kept = PassNotes.from_tensors(self._watch, [note.clone() for note in notes])
        for listener in list(self._listeners):
            listener.end(batch, kept)

    def shapes_for_graph(self, num_slots: int) -> tuple[list[int], torch.dtype]:
        """See `graph_ops.Host`."""
        return [self._spec.num_layers, num_slots if self._forcing else 0, self._spec.top_k], id_dtype(self._spec)

    def _begin(self, batch: Batch) -> ReplayRows | None:
        given = [listener.begin(batch) for listener in self._listeners]
        return next((rows for rows in given if rows is not None), None)

    def _run_router(self, seat: Seat, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = seat.now
        if not torch.compiler.is_compiling():
            self._require_own_thread(seat.path)
        if now is None:
            raise ReplayError(
                f"router {seat.path} ran outside a forward of {type(self._trunk).__name__}; call the model that was "
                "attached, not a part of it, and open sessions before a forward, not in the middle"
            )
        if not torch.compiler.is_compiling():
            self._require_own_checkpointing(seat.path)
        mode = seat.mode(seat.final, now.rows)
        with mode:
            result = forward(*args, **kwargs)
        if len(mode.seen) != seat.final + 1:
            raise ReplayError(
                f"router {seat.path} made {len(mode.seen)} top-k selections, but {seat.final + 1} when it was "
                "attached; its forward takes another path now. Attach again"
            )
        chosen = mode.seen[-1]
        if chosen.ids_RK.shape[0] != now.num_slots:
            raise ReplayError(
                f"router {seat.path} saw {chosen.ids_RK.shape[0]} of the {now.num_slots} positions of the batch; "
                "a router that sees only the text of it cannot be recorded or replayed"
            )
        if now.notes is not None:
            own_ids = chosen.ids_RK if chosen.own_ids_RK is None else chosen.own_ids_RK
            scores = chosen.scores_RE.detach()
            now.notes.write(scores, chosen.ids_RK, own_ids, by_probability=chosen.by_probability)
        if torch.compiler.is_compiling():
            now.calls_1.add_(1)
            return result
        self._passes.top.calls[seat.layer] += 1
        return with_gate_weights(seat, result, now)

    def _run_compiled(self, path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer with a graph of its own, in which its router cannot look around."""
        if self._passes and not torch.compiler.is_compiling():
            self._require_own_checkpointing(path)
        return call(*args, **kwargs)

    def _run_checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if torch.compiler.is_compiling() or not self._passes:
            return checkpoint(function, *args, **kwargs)
        return checkpoint(self._rearmed(function, self._passes.top.input), *args, **kwargs)

    def _rearmed(self, function: Callable[..., Any], first: PassInput) -> Callable[..., Any]:
        """A checkpointed function that runs on the input of its own pass again whenever it is recomputed."""
        ran_before = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran_before
            if ran_before:
                with self._passes.on_top(first.open(recompute=True)), self._hooks(whole=False):
                    return function(*args, **kwargs)
            ran_before = True
            self._checkpoints_open += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._checkpoints_open -= 1

        return run

    def _require_own_thread(self, path: str) -> None:
        """Raise `ReplayError` if the router runs in a forward that began before another thread opened its session."""
        self._passes.require_own_thread(path)
        if not self._passes:
            self._sessions.require_mine(f"runs {path} of a model")

    def _require_own_checkpointing(self, path: str) -> None:
        current = self._passes.top
        if not current.recompute and not self._checkpoints_open:
            require_prepared(path, began_with_grad=current.with_grad)
